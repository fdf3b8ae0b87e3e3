// Memory and lanes on two canvases with one horizontal axis. A pixel column shows the moment with the most bytes in it,
// so that no peak is lost however many moments share a pixel.

const LEFT = 74, RIGHT = 12, TOP = 10, BOTTOM = 22, LANE = 15, GAP = 5;

class Chart {
  constructor(plan, elements, listeners) {
    this.plan = plan;
    this.memory = elements.memory;
    this.lanes = elements.lanes;
    this.box = elements.box;
    this.listeners = listeners;
    this.which = "planned";
    this.axis = plan.planned.seconds > 0 ? "time" : "order";
    this.view = [0, 1]; // share of the axis
    this.cursor = plan.planned.peak;
    this.pinned = null;
    this.buffer = null;
    this.drag = null;
    this.listen();
  }

  get course() { return this.plan.courses[this.which]; }

  // -- where moments lie ------------------------------------------------------------------------------------

  span(course) {
    if (this.axis === "order") return Math.max(course.count, 1);
    return Math.max(this.plan.planned.seconds, this.plan.unplanned.seconds) || 1;
  }

  // Begin and end of a moment on the axis, from 0 to 1.
  place(course, moment) {
    const span = this.span(course);
    return this.axis === "order"
      ? [moment / span, (moment + 1) / span]
      : [course.from[moment] / span, course.to[moment] / span];
  }

  x(share) {
    const [low, high] = this.view;
    return LEFT + ((share - low) / (high - low)) * (this.width - LEFT - RIGHT);
  }

  share(x) {
    const [low, high] = this.view;
    return low + ((x - LEFT) / (this.width - LEFT - RIGHT)) * (high - low);
  }

  // Per pixel column, the moment with the most bytes in it, or -1.
  columns(course) {
    const width = Math.max(1, Math.floor(this.width - LEFT - RIGHT));
    const found = new Int32Array(width).fill(-1);
    for (let m = 0; m < course.count; m++) {
      const [a, b] = this.place(course, m);
      const first = Math.floor(this.x(a) - LEFT), last = Math.max(first, Math.ceil(this.x(b) - LEFT) - 1);
      for (let c = Math.max(first, 0); c <= Math.min(last, width - 1); c++)
        if (found[c] < 0 || course.bytes[m] > course.bytes[found[c]]) found[c] = m;
    }
    return found;
  }

  momentAt(x) {
    const columns = this.columnsDrawn;
    if (!columns || !columns.length) return null;
    const c = Math.min(Math.max(Math.round(x - LEFT), 0), columns.length - 1);
    for (let d = 0; d < columns.length; d++)
      for (const each of [c - d, c + d]) if (columns[each] >= 0) return columns[each];
    return null;
  }

  // -- drawing ----------------------------------------------------------------------------------------------

  draw() {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => { this.asked = false; this.drawNow(); });
  }

  drawNow() {
    this.width = this.memory.clientWidth;
    const style = getComputedStyle(document.documentElement);
    this.colour = name => style.getPropertyValue(`--${name}`).trim();
    this.drawMemory();
    this.drawLanes();
    this.describe();
  }

  context(canvas, height) {
    const ratio = window.devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(this.width * ratio);
    canvas.height = Math.round(height * ratio);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    return context;
  }

  top() {
    const { budget, peak, unplanned, resident, smallest } = this.plan.bytes;
    const most = this.plan.resident + Math.max(...[this.plan.planned, this.plan.unplanned].map(c => c.bytes[c.peak] || 0));
    const measured = this.plan.measured.map(each => each.peak_bytes);
    // A budget that is far above all else would leave the chart empty.
    return Math.max(most, peak, unplanned, ...measured, budget < 2 * most ? budget : 0, smallest < most ? smallest : 0, resident, 1) * 1.06;
  }

  drawMemory() {
    const height = this.width < 560 ? 260 : 320;
    const context = this.context(this.memory, height), course = this.course, most = this.top();
    const y = bytes => height - BOTTOM - (bytes / most) * (height - TOP - BOTTOM);
    this.grid(context, most, y, height);
    const columns = (this.columnsDrawn = this.columns(course));
    const other = this.plan.courses[this.which === "planned" ? "unplanned" : "planned"];
    CATEGORIES.forEach(([name], category) => {
      context.fillStyle = this.colour(name);
      for (let c = 0; c < columns.length; c++) {
        const m = columns[c];
        if (m < 0) continue;
        let below = 0;
        for (let k = 0; k < category; k++) below += course.stack[k][m];
        const here = course.stack[category][m];
        if (here <= 0) continue;
        if (category === 0) this.resident(context, LEFT + c, y);
        else context.fillRect(LEFT + c, y(below + here), 1, y(below) - y(below + here));
      }
    });
    this.outline(context, other, y);
    this.measured(context, course, y);
    this.lifetime(context, course, TOP, height - BOTTOM);
    this.levels(context, y);
    this.uprights(context, course, height);
  }

  grid(context, most, y, height) {
    context.strokeStyle = this.colour("line");
    context.fillStyle = this.colour("soft");
    context.lineWidth = 1;
    context.textAlign = "right";
    for (const tick of ticks(most, height / 55, true)) {
      const at = Math.round(y(tick)) + 0.5;
      line(context, LEFT, at, this.width - RIGHT, at);
      context.fillText(bytesText(tick).replace(/\.00 /, " "), LEFT - 7, at);
    }
    const span = this.span(this.course), [low, high] = this.view;
    const step = ticks((high - low) * span, Math.max(2, this.width / 130), false)[1] || 1;
    const time = timesText(high * span);
    for (let at = Math.ceil((low * span) / step) * step; at <= high * span * 1.00001; at += step) {
      const x = this.x(at / span);
      if (x < LEFT - 1 || x > this.width - RIGHT + 1) continue;
      context.textAlign = x > this.width - RIGHT - 24 ? "right" : "center";
      context.fillText(this.axis === "time" ? time(at) : Math.round(at).toLocaleString("en"),
        Math.min(x, this.width - RIGHT), height - BOTTOM / 2 + 1);
    }
  }

  // One column of what is resident, kind by kind.
  resident(context, x, y) {
    let below = 0;
    this.plan.resident_parts.forEach(([, bytes], i, all) => {
      context.globalAlpha = residentShade(i, all.length);
      context.fillRect(x, y(below + bytes), 1, y(below) - y(below + bytes));
      below += bytes;
    });
    context.globalAlpha = 1;
  }

  // What the allocator counted in a run of the step that is stacked, each span where as many bytes are handed out.
  measured(context, course, y) {
    if (!course.measured) return;
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, this.width - LEFT - RIGHT, this.memory.clientHeight);
    context.clip();
    context.strokeStyle = this.colour("good");
    context.lineWidth = 1.5;
    context.beginPath();
    let begun = false;
    const half = course.boundaryMoment < 0 ? course.count : course.boundaryMoment;
    for (const [levels, first, end] of [[course.measured.forward, 0, half], [course.measured.backward, half, course.count]]) {
      const places = this.spans(course, levels.length, first, end);
      levels.forEach((bytes, i) => {
        for (const x of places.length ? [places[i], places[i + 1]] : []) {
          if (begun) context.lineTo(x, y(bytes));
          else context.moveTo(x, y(bytes));
          begun = true;
        }
      });
    }
    context.stroke();
    context.restore();
  }

  // Where the edges of so many spans lie, in each of which the moments hand out equally many bytes.
  spans(course, count, first, end) {
    let total = 0;
    for (let m = first; m < end; m++) total += course.handedOut[m];
    const found = [];
    for (let m = first, before = 0; m < end; before += course.handedOut[m], m++) {
      const here = course.handedOut[m], [a, b] = this.place(course, m);
      while (here > 0 && found.length <= count && (found.length * total) / count <= before + here)
        found.push(this.x(a + (b - a) * Math.max(0, ((found.length * total) / count - before) / here)));
    }
    while (found.length && found.length <= count) found.push(found.at(-1)); // sums of floating point
    return found;
  }

  // The step that is not stacked, as a line; by order of ops it has another axis, so it is left out there.
  outline(context, course, y) {
    if (this.axis === "order") return;
    context.strokeStyle = this.colour("soft");
    context.lineWidth = 1.2;
    context.beginPath();
    let begun = false;
    this.columns(course).forEach((m, c) => {
      if (m < 0) return;
      const at = y(this.plan.resident + course.bytes[m]);
      if (begun) context.lineTo(LEFT + c + 0.5, at);
      else context.moveTo(LEFT + c + 0.5, at);
      begun = true;
    });
    context.stroke();
  }

  levels(context, y) {
    const { budget, floor, unplanned } = this.plan.bytes;
    const rules = [["budget", budget, "warn", [], allowedText], ["floor", floor, "soft", [2, 4], bytesText],
      // The unplanned step that is drawn is that of the rewritten program; the captured one is known by its peak.
      ...(this.plan.rewrites.length ? [["unplanned, as captured,", unplanned, "soft", [8, 3], bytesText]] : []),
      ...this.plan.measured.map(each => [`${each.label}, measured`, each.peak_bytes, "good", [6, 4], bytesText])];
    const labels = [];
    for (const [name, bytes, colour, dash, text] of rules) {
      const at = y(bytes);
      if (at < 0) continue;
      context.strokeStyle = context.fillStyle = this.colour(colour);
      context.lineWidth = 1.5;
      context.setLineDash(dash);
      line(context, LEFT, at, this.width - RIGHT, at);
      context.setLineDash([]);
      let label = Math.max(at - 8, 7);
      while (labels.some(each => Math.abs(each - label) < 13)) label += 13;
      labels.push(label);
      this.label(context, `${name} ${text(bytes)}`, LEFT + 6, label, colour);
    }
  }

  label(context, text, x, at, colour) {
    context.textAlign = "left";
    const width = context.measureText(text).width;
    context.globalAlpha = 0.8;
    context.fillStyle = this.colour("card");
    context.fillRect(x - 3, at - 7, width + 6, 14);
    context.globalAlpha = 1;
    context.fillStyle = this.colour(colour);
    context.fillText(text, x, at);
  }

  uprights(context, course, height) {
    const upright = (moment, colour, dash, width) => {
      const [a, b] = this.place(course, moment), x = Math.round(this.x((a + b) / 2)) + 0.5;
      if (x < LEFT || x > this.width - RIGHT) return;
      context.strokeStyle = this.colour(colour);
      context.lineWidth = width;
      context.setLineDash(dash);
      line(context, x, TOP - 4, x, height - BOTTOM);
      context.setLineDash([]);
      return x;
    };
    if (course.boundaryMoment >= 0) {
      const x = upright(course.boundaryMoment, "soft", [4, 3], 1);
      if (x !== undefined && this.width > 560) this.label(context, "backward", Math.min(x + 4, this.width - 70), TOP + 4, "soft");
    }
    if (this.pinned !== null && this.pinned < course.count) upright(this.pinned, "ink", [], 1.5);
    if (this.cursor < course.count && this.showsCursor) upright(this.cursor, "ink", [1, 2], 1);
  }

  lifetime(context, course, top, bottom) {
    if (this.buffer === null) return;
    context.globalAlpha = 0.16;
    context.fillStyle = this.colour("ink");
    for (const stay of course.staysOf[this.buffer]) {
      const [a, b] = this.extent(course, stay);
      if (b > LEFT && a < this.width - RIGHT) context.fillRect(a, top, Math.max(b - a, 1.5), bottom - top);
    }
    context.globalAlpha = 1;
  }

  extent(course, stay) {
    const a = this.x(this.place(course, course.stay_first[stay])[0]);
    const b = this.x(this.place(course, course.stay_last[stay])[1]);
    return [Math.max(a, LEFT), Math.min(b, this.width - RIGHT)];
  }

  drawLanes() {
    const course = this.course, rows = [...course.lanes, ...(this.buffer === null ? [] : ["tensor"])];
    const context = this.context(this.lanes, rows.length * (LANE + GAP) + 4);
    rows.forEach((name, row) => {
      const top = row * (LANE + GAP) + 2;
      context.fillStyle = this.colour("soft");
      context.textAlign = "right";
      context.fillText(name, LEFT - 7, top + LANE / 2);
      context.fillStyle = this.colour("hover");
      context.fillRect(LEFT, top, this.width - LEFT - RIGHT, LANE);
      if (name === "tensor") this.drawTensor(context, course, top);
      else this.drawLane(context, course, row, top);
    });
  }

  drawLane(context, course, lane, top) {
    const span = this.span(course), right = this.width - RIGHT;
    for (let m = 0; m < course.count; m++) {
      if ((course.lane.length ? course.lane[m] : 0) !== lane || course.kind[m] === "b") continue;
      const [p, q] = this.axis === "order" ? this.place(course, m) : [course.begin[m] / span, course.end[m] / span];
      const a = Math.max(this.x(p), LEFT), b = Math.min(this.x(q), right);
      if (b < LEFT || a > right) continue;
      const late = course.boundaryMoment >= 0 && m > course.boundaryMoment;
      context.fillStyle = this.colour(
        course.kind[m] !== "c" ? "reloaded" : course.isAgain[m] ? "again" : late ? "gradients" : "kept");
      context.fillRect(a, top, Math.max(b - a, 0.6), LANE);
      const wait = course.waits.get(m);
      if (wait && this.axis === "time") {
        context.fillStyle = this.colour("warn");
        context.fillRect(Math.max(this.x((course.begin[m] - wait) / span), LEFT), top + LANE - 4, Math.max((wait / span) * (this.x(1) - this.x(0)), 1), 4);
      }
    }
  }

  drawTensor(context, course, top) {
    for (const stay of course.staysOf[this.buffer]) {
      const [a, b] = this.extent(course, stay);
      if (b < LEFT || a > this.width - RIGHT) continue;
      context.fillStyle = this.colour(course.isReloaded[stay] ? "reloaded" : course.isLater[stay] ? "again" : "kept");
      context.fillRect(a, top, Math.max(b - a, 2), LANE);
    }
    context.fillStyle = this.colour("ink");
    const readers = new Set(this.plan.readers[this.buffer]);
    for (let m = 0; m < course.count; m++) {
      if (course.kind[m] !== "c" || !readers.has(course.target[m])) continue;
      const [a, b] = this.place(course, m), x = this.x((a + b) / 2);
      if (x >= LEFT && x <= this.width - RIGHT) context.fillRect(x - 0.5, top, 1, LANE);
    }
  }

  // -- what is said and done ---------------------------------------------------------------------------------

  describe() {
    const course = this.course;
    this.box.setAttribute("aria-valuemax", Math.max(course.count - 1, 0));
    this.box.setAttribute("aria-valuenow", this.cursor);
    this.box.setAttribute("aria-valuetext", this.told());
  }

  told() {
    const course = this.course, m = this.cursor;
    if (!course.count) return "nothing runs in this step";
    const parts = CATEGORIES.map(([, words], c) => [words, course.stack[c][m]]).filter(([, bytes]) => bytes > 0)
      .sort((a, b) => b[1] - a[1]).slice(0, 3).map(([words, bytes]) => `${bytesText(bytes)} ${words}`);
    return `${m === course.peak ? "Peak: " : ""}${bytesText(this.plan.resident + course.bytes[m])} at ${course.told(m)}: ${parts.join(", ")}`;
  }

  move(moment) {
    this.cursor = Math.min(Math.max(moment, 0), Math.max(this.course.count - 1, 0));
    this.showsCursor = true;
    const [a, b] = this.place(this.course, this.cursor), middle = (a + b) / 2, [low, high] = this.view;
    if (middle < low || middle > high) this.look(middle - (high - low) / 2, middle + (high - low) / 2);
    this.listeners.moved(this.told());
    this.draw();
  }

  pin(moment) {
    this.pinned = moment;
    if (moment !== null) this.cursor = moment;
    this.listeners.pinned(moment, this.which);
    this.draw();
  }

  select(buffer) { this.buffer = buffer; this.draw(); }

  look(low, high) {
    const least = 4 / Math.max(this.course.count, 4), width = Math.min(Math.max(high - low, least), 1);
    low = Math.min(Math.max(low, 0), 1 - width);
    this.view = [low, low + width];
    this.draw();
  }

  zoom(factor, about) {
    const [low, high] = this.view;
    const middle = about ?? (this.showsCursor ? this.place(this.course, this.cursor)[0] : (low + high) / 2);
    this.look(middle - (middle - low) * factor, middle + (high - middle) * factor);
  }

  choose(which, axis) {
    if (which !== this.which) {
      this.which = which;
      this.cursor = this.course.peak;
      this.pin(null);
    }
    this.axis = axis;
    this.view = [0, 1];
    this.listeners.moved(this.told());
    this.draw();
  }

  listen() {
    const at = event => event.clientX - this.memory.getBoundingClientRect().left;
    this.box.addEventListener("pointermove", event => {
      if (this.drag !== null && Math.abs(at(event) - this.drag) > 6) this.dragged = true;
      const moment = this.momentAt(at(event));
      if (moment === null || event.pointerType === "touch") return;
      this.cursor = moment;
      this.showsCursor = true;
      this.listeners.moved(this.told());
      this.draw();
    });
    this.box.addEventListener("pointerdown", event => { this.drag = at(event); this.dragged = false; });
    this.box.addEventListener("pointercancel", () => { this.drag = null; });
    this.box.addEventListener("pointerup", event => {
      if (this.drag === null) return;
      const [from, to] = [this.drag, at(event)].sort((a, b) => a - b).map(x => this.share(x));
      const dragged = this.dragged && event.pointerType !== "touch";
      this.drag = null;
      if (dragged) return this.look(from, to);
      const moment = this.momentAt(at(event));
      if (moment === null) return;
      this.cursor = moment;
      this.showsCursor = true;
      this.listeners.moved(this.told());
      this.pin(moment);
    });
    this.box.addEventListener("pointerleave", () => { this.showsCursor = this.box.matches(":focus"); this.draw(); });
    this.box.addEventListener("keydown", event => {
      const far = Math.max(1, Math.round(this.course.count / 50));
      const keys = {
        ArrowRight: () => this.move(this.cursor + 1), ArrowLeft: () => this.move(this.cursor - 1),
        ArrowUp: () => this.move(this.cursor + 1), ArrowDown: () => this.move(this.cursor - 1),
        PageUp: () => this.move(this.cursor + far), PageDown: () => this.move(this.cursor - far),
        Home: () => this.move(0), End: () => this.move(this.course.count - 1),
        p: () => this.move(this.course.peak), Enter: () => this.course.count && this.pin(this.cursor),
        Escape: () => this.pin(null), "+": () => this.zoom(0.5), "-": () => this.zoom(2),
      };
      if (!(event.key in keys) || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      keys[event.key]();
    });
  }
}

function line(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}
