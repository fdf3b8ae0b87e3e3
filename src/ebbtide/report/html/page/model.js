// The page's data: columns as they were written, and what follows from them.

const CATEGORIES = [
  ["resident", "resident before the step"],
  ["kept", "kept for the backward"],
  ["brief", "other results of the forward"],
  ["again", "recomputed"],
  ["reloaded", "fetched back"],
  ["gradients", "gradients of weights"],
  ["backward", "other results of the backward"],
  ["other", "workspace and other"],
];
const OTHER = CATEGORIES.length - 1;

class Course {
  // Moments and stays of one step; see report/records/course.py for what these are.
  constructor(columns, plan) {
    Object.assign(this, columns);
    this.count = this.bytes.length;
    this.plan = plan;
    this.isAgain = flags(this.again, this.count);
    this.isLater = flags(this.later, this.stay_buffer.length);
    this.isReloaded = flags(this.reloaded, this.stay_buffer.length);
    this.boundaryMoment = this.kind.indexOf("b");
    this.waits = new Map(this.wait);
    this.staysOf = groups(this.stay_buffer, plan.buffers.bytes.length);
    this.seconds = this.end.reduce((most, each) => Math.max(most, each), 0);
    this.measured = null; // a curve of a run, if one was recorded
    this.peak = this.bytes.reduce((best, each, i) => (each > this.bytes[best] ? i : best), 0);
    this.from = new Float64Array(this.count);
    this.to = new Float64Array(this.count);
    let now = 0;
    for (let m = 0; m < this.count; m++) {
      // Transfers are issued at once and run on their own lanes; what they allocate is there from then on.
      const computes = this.kind[m] === "c" || this.kind[m] === "b";
      this.from[m] = computes ? this.begin[m] : now;
      this.to[m] = computes ? (now = this.end[m]) : now;
    }
    this.stack = this.stacked();
    this.handedOut = this.stack[OTHER].slice(); // bytes per moment: its workspace, and the stays that begin
    this.stay_first.forEach((m, s) => { this.handedOut[m] += plan.buffers.bytes[this.stay_buffer[s]]; });
  }

  categoryOf(stay) {
    const buffer = this.stay_buffer[stay], op = this.plan.buffers.op[buffer];
    if (this.isReloaded[stay]) return 4;
    if (this.isLater[stay]) return 3;
    if (this.plan.isGradient[buffer]) return 5;
    if (op < 0 || op >= this.plan.boundary) return 6;
    const b = this.boundaryMoment;
    return b >= 0 && this.stay_first[stay] < b && this.stay_last[stay] >= b ? 1 : 2;
  }

  // Per category, bytes at every moment; they add up to the moment's bytes and the resident part.
  stacked() {
    const stack = CATEGORIES.map(() => new Float64Array(this.count + 1));
    this.category = new Uint8Array(this.stay_buffer.length);
    for (let s = 0; s < this.stay_buffer.length; s++) {
      const c = (this.category[s] = this.categoryOf(s)), size = this.plan.buffers.bytes[this.stay_buffer[s]];
      stack[c][this.stay_first[s]] += size;
      stack[c][this.stay_last[s] + 1] -= size;
    }
    for (let c = 1; c < OTHER; c++) for (let m = 1; m < this.count; m++) stack[c][m] += stack[c][m - 1];
    for (let m = 0; m < this.count; m++) {
      stack[0][m] = this.plan.resident;
      let known = 0;
      for (let c = 1; c < OTHER; c++) known += stack[c][m];
      stack[OTHER][m] = this.bytes[m] - known;
    }
    return stack.map(each => each.subarray(0, this.count));
  }

  residentAt(moment) {
    const found = [];
    for (let s = 0; s < this.stay_buffer.length && this.stay_first[s] <= moment; s++)
      if (this.stay_last[s] >= moment) found.push(this.stay_buffer[s]);
    return found;
  }

  // The moment in words.
  told(moment) {
    const kind = this.kind[moment], target = this.target[moment], plan = this.plan;
    if (kind === "b") return "the end of the forward";
    if (kind !== "c") return `${kind === "o" ? "moving away" : "fetching back"} ${plan.bufferName(target)}`;
    return `${plan.opTold(target)}${this.isAgain[moment] ? ", run again" : ""}`;
  }
}

// Shades of one colour for what is resident, from the bottom up.
const residentShade = (index, count) => (count < 2 ? 1 : 1 - (0.7 * index) / (count - 1));

class Plan {
  constructor(data) {
    Object.assign(this, data);
    this.text = index => this.texts[index];
    this.resident = data.bytes.resident;
    this.isGradient = flags(this.buffers.gradient, this.buffers.bytes.length);
    this.readers = readersOf(this.ops.inputs, this.buffers.bytes.length);
    this.planned = new Course(data.planned, this);
    this.unplanned = new Course(data.unplanned, this);
    this.courses = { planned: this.planned, unplanned: this.unplanned };
    for (const each of this.measured)
      if (each.curve && each.label in this.courses) this.courses[each.label].measured = each.curve;
    this.momentsOfOp = groups(
      this.planned.target.map((t, m) => (this.planned.kind[m] === "c" ? t : -1)), this.ops.name.length);
    this.movesOf = new Map();
    for (let m = 0; m < this.planned.count; m++)
      if ("or".includes(this.planned.kind[m])) {
        const of = this.planned.target[m];
        this.movesOf.set(of, [...(this.movesOf.get(of) || []), m]);
      }
  }

  bufferName(b) { return this.text(this.buffers.name[b]); }
  opName(op) { return this.text(this.ops.name[op]); }
  moduleOf(b) { const op = this.buffers.op[b]; return op < 0 ? "" : this.text(this.ops.module[op]); }
  sourceOf(b) { const op = this.buffers.op[b]; return op < 0 ? "" : this.text(this.ops.source[op]); }
  targetOf(b) { const op = this.buffers.op[b]; return op < 0 ? "tangent" : this.text(this.ops.target[op]); }
  decisionOf(b) { return this.decisions[this.buffers.decision[b]]; }

  opTold(op) {
    const where = this.text(this.ops.module[op]), source = this.text(this.ops.source[op]);
    return `${this.opName(op)} (${this.text(this.ops.target[op])})${where ? ` in ${where}` : ""}${source ? ` at ${source}` : ""}`;
  }

  // Why the plan does what it does with a buffer: what the program says, and what the choice costs.
  why(b) {
    const op = this.buffers.op[b], name = op < 0 ? "" : this.opName(op);
    const said = this.buffers.why[b].map(each => this.whys[each]
      .replace("{op}", name).replace("{state}", op < 0 ? "" : bytesText(this.ops.state[op])));
    const price = this.price(b);
    return [...said, ...(price ? [price] : [])].join("; ");
  }

  price(b) {
    const op = this.buffers.op[b], stays = this.planned.staysOf[b], last = this.readers[b].at(-1);
    const takes = op < 0 ? "" : secondsText(this.ops.seconds[op]);
    switch (this.decisionOf(b)) {
      case "recomputed":
      case "moved, recomputed":
      case "moved": {
        const gaps = stays.slice(1).map((s, i) => this.planned.stay_first[s] - this.planned.stay_last[stays[i]] - 1);
        const idle = Math.max(0, ...gaps);
        const runs = stays.slice(1).filter(s => !this.planned.isReloaded[s]).length;
        const moves = (this.movesOf.get(b) || []).reduce((sum, m) => sum + this.planned.end[m] - this.planned.begin[m], 0);
        return [
          `not in memory for ${idle.toLocaleString("en")} moments`,
          ...(runs ? [`${runs === 1 ? "one more run" : `${runs} more runs`} of ${this.opName(op)}, ${takes} each`] : []),
          ...(moves ? [`${secondsText(moves)} of transfers`] : []),
        ].join("; ");
      }
      case "kept":
        return last === undefined ? "" : `read by ${this.opName(last)} in the backward; made again, it would take ${takes} or more`;
      case "temporary":
        return last === undefined ? "" : `not needed after ${this.opName(last)}`;
      case "rewritten":
        return "made by what takes the place of a part of the step";
      case "dropped at once":
        return "nothing reads it";
      default:
        return "";
    }
  }
}

function flags(indices, count) {
  const found = new Uint8Array(count);
  for (const i of indices) found[i] = 1;
  return found;
}

// Per group, the indices of the items in it; items of group -1 are in none.
function groups(items, count) {
  const found = Array.from({ length: count }, () => []);
  items.forEach((group, index) => group >= 0 && found[group].push(index));
  return found;
}

function readersOf(inputs, count) {
  const found = Array.from({ length: count }, () => []);
  inputs.forEach((buffers, op) => buffers.forEach(b => found[b].push(op)));
  return found;
}
