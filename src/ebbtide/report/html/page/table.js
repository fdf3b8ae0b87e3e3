// The table of tensors: of any number of rows, those that can be seen are in the document.

const COLUMNS = [
  ["name", "Tensor", "code", (p, b) => p.bufferName(b)],
  ["bytes", "Size", "number", (p, b) => bytesText(p.buffers.bytes[b])],
  ["decision", "Decision", "", (p, b) => p.decisionOf(b)],
  ["life", "In memory", "", null],
  ["op", "Op", "code soft", (p, b) => p.targetOf(b)],
  ["module", "Module", "code soft", (p, b) => p.moduleOf(b)],
  ["source", "Line", "code soft tail", (p, b) => p.sourceOf(b)],
  ["why", "Why", "soft", (p, b) => p.why(b)],
];
const DESCENDING = new Set(["bytes", "life"]); // at the first click

class Table {
  constructor(plan, elements, listeners) {
    this.plan = plan;
    Object.assign(this, elements); // head, body, space, count, search, chips
    this.listeners = listeners;
    this.order = ["bytes", "descending"];
    this.decision = null;
    this.moment = null;
    this.current = null;
    this.rows = [];
    this.words = plan.buffers.name.map((_, b) =>
      [plan.bufferName(b), plan.buffers.op[b] < 0 ? "" : plan.opName(plan.buffers.op[b]), plan.targetOf(b), plan.moduleOf(b), plan.sourceOf(b)]
        .join("\n").toLowerCase());
    this.lengths = this.lifetimes();
    this.heads();
    this.chipsOf();
    this.listen();
    this.update();
  }

  // Moments for which each buffer is in memory.
  lifetimes() {
    const course = this.plan.planned;
    return course.staysOf.map(stays => stays.reduce((sum, s) => sum + course.stay_last[s] - course.stay_first[s] + 1, 0));
  }

  heads() {
    for (const [key, title, kind] of COLUMNS) {
      const button = make("button", { type: "button", text: title });
      const cell = make("div", { role: "columnheader", class: `cell ${kind.includes("number") ? "number" : ""}`, "aria-sort": "none" }, button);
      button.addEventListener("click", () => this.sortBy(key));
      this.head.append(cell);
    }
  }

  chipsOf() {
    const numbers = new Map();
    this.plan.buffers.decision.forEach(each => numbers.set(each, (numbers.get(each) || 0) + 1));
    const chip = (text, number, decision) => {
      const button = make("button", { type: "button", "aria-pressed": String(decision === this.decision) },
        ...(decision === null ? [] : [dot(text)]), text, make("span", { class: "n", text: number.toLocaleString("en") }));
      button.addEventListener("click", () => {
        this.decision = decision === this.decision ? null : decision;
        [...this.chips.children].forEach(each => each.setAttribute("aria-pressed", String(each === button ? this.decision === decision : this.decision === null && each === this.chips.firstChild)));
        this.update();
      });
      this.chips.append(button);
    };
    chip("all", this.words.length, null);
    this.plan.decisions.forEach((text, index) => numbers.has(index) && chip(text, numbers.get(index), index));
  }

  sortBy(key) {
    const [now, way] = this.order;
    const first = DESCENDING.has(key) ? "descending" : "ascending";
    this.order = [key, now === key ? (way === "ascending" ? "descending" : "ascending") : first];
    this.update();
  }

  // -- which rows -------------------------------------------------------------------------------------------

  update() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const among = this.moment === null ? null : new Set(this.plan.courses[this.moment.which].residentAt(this.moment.at));
    const { bytes, decision } = this.plan.buffers;
    this.rows = this.words.map((_, b) => b).filter(b =>
      (this.decision === null || decision[b] === this.decision) && (!among || among.has(b)) &&
      words.every(each => this.words[b].includes(each)));
    this.sort();
    const total = this.rows.reduce((sum, b) => sum + bytes[b], 0);
    const all = this.words.length === this.rows.length ? "" : ` of ${this.words.length.toLocaleString("en")}`;
    this.count.replaceChildren(`${this.rows.length.toLocaleString("en")}${all} tensors, ${bytesText(total)} in all`);
    if (this.moment) {
      const clear = make("button", { type: "button", text: "show all again" });
      clear.addEventListener("click", () => this.listeners.cleared());
      this.count.append(` in memory at ${this.plan.courses[this.moment.which].told(this.moment.at)}`,
        this.moment.which === "unplanned" ? ", unplanned " : " ", clear);
    }
    this.body.parentElement.setAttribute("aria-rowcount", this.rows.length + 1);
    [...this.head.children].forEach((cell, i) => cell.setAttribute("aria-sort", COLUMNS[i][0] === this.order[0] ? this.order[1] : "none"));
    this.body.scrollTop = 0;
    this.draw();
  }

  sort() {
    const [key, way] = this.order, plan = this.plan, sign = way === "ascending" ? 1 : -1;
    const numbers = { bytes: plan.buffers.bytes, life: this.lengths, decision: plan.buffers.decision, op: null }[key];
    if (numbers) return this.rows.sort((a, b) => sign * (numbers[a] - numbers[b]) || a - b);
    const column = COLUMNS.find(each => each[0] === key)[3];
    const texts = new Map(this.rows.map(b => [b, column(plan, b)]));
    const compare = new Intl.Collator("en", { numeric: true }).compare;
    this.rows.sort((a, b) => sign * compare(texts.get(a), texts.get(b)) || a - b);
  }

  // -- drawing ----------------------------------------------------------------------------------------------

  get rowHeight() { return window.matchMedia("(max-width: 720px)").matches ? 54 : 30; }

  draw() {
    const height = this.rowHeight;
    // Browsers draw no element that is much higher than this.
    const most = Math.min(this.rows.length, Math.floor(16e6 / height));
    this.space.style.height = `${most * height}px`;
    const first = Math.max(Math.floor(this.body.scrollTop / height) - 5, 0);
    const last = Math.min(first + Math.ceil(this.body.clientHeight / height) + 10, most);
    this.space.replaceChildren(...Array.from({ length: Math.max(last - first, 0) }, (_, i) => this.row(first + i, height)));
    const bar = this.body.offsetWidth - this.body.clientWidth;
    this.head.parentElement.style.setProperty("--bar", `${bar}px`);
  }

  row(index, height) {
    const b = this.rows[index], plan = this.plan;
    const cells = COLUMNS.map(([key, , kind, text]) => {
      const cell = make("div", { role: "cell", class: `cell ${kind}` });
      if (key === "life") cell.append(this.life(b));
      else {
        const words = text(plan, b);
        if (key === "decision") cell.append(dot(words));
        cell.append(kind.includes("tail") ? make("bdi", { text: words }) : words);
        cell.title = words;
      }
      return cell;
    });
    const row = make("div", { role: "row", class: `row${b === this.current ? " current" : ""}`, "aria-rowindex": index + 2, "data-buffer": b }, ...cells);
    row.style.top = `${index * height}px`;
    if (b === this.current) row.setAttribute("aria-current", "true");
    row.addEventListener("click", () => this.listeners.selected(b));
    return row;
  }

  life(b) {
    const course = this.plan.planned, count = Math.max(course.count, 1);
    const box = make("div", { class: "life", role: "img", "aria-label": this.plan.lifeTold(b) });
    box.title = this.plan.lifeTold(b);
    for (const s of course.staysOf[b]) {
      const bar = make("i", { class: course.isReloaded[s] ? "reloaded" : course.isLater[s] ? "later" : "" });
      bar.style.left = `${(100 * course.stay_first[s]) / count}%`;
      bar.style.width = `${(100 * (course.stay_last[s] - course.stay_first[s] + 1)) / count}%`;
      box.append(bar);
    }
    if (course.boundaryMoment >= 0) {
      const mark = make("b", {});
      mark.style.left = `${(100 * course.boundaryMoment) / count}%`;
      box.append(mark);
    }
    return box;
  }

  // -- what is done -----------------------------------------------------------------------------------------

  select(b) { this.current = b; this.draw(); }

  show(b) {
    if (!this.rows.includes(b)) {
      this.search.value = "";
      this.decision = null;
      this.moment = null;
      [...this.chips.children].forEach((each, i) => each.setAttribute("aria-pressed", String(i === 0)));
      this.update();
    }
    const at = this.rows.indexOf(b) * this.rowHeight;
    if (at < this.body.scrollTop || at + this.rowHeight > this.body.scrollTop + this.body.clientHeight)
      this.body.scrollTop = Math.max(at - this.body.clientHeight / 2, 0);
    this.select(b);
  }

  at(moment, which) { this.moment = moment === null ? null : { at: moment, which }; this.update(); }

  listen() {
    let waits = 0;
    this.search.addEventListener("input", () => { clearTimeout(waits); waits = setTimeout(() => this.update(), 80); });
    this.body.addEventListener("scroll", () => requestAnimationFrame(() => this.draw()), { passive: true });
    this.body.addEventListener("keydown", event => {
      const here = this.current === null ? -1 : this.rows.indexOf(this.current), page = Math.floor(this.body.clientHeight / this.rowHeight);
      const to = { ArrowDown: here + 1, ArrowUp: here - 1, PageDown: here + page, PageUp: here - page, Home: 0, End: this.rows.length - 1, Enter: Math.max(here, 0) }[event.key];
      if (to === undefined || !this.rows.length || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      this.listeners.selected(this.rows[Math.min(Math.max(to, 0), this.rows.length - 1)]);
    });
  }
}

function dot(decision) { return make("span", { class: `dot ${decision.split(/[ ,]/)[0]}`, "aria-hidden": "true" }); }

// An element with attributes, `text` among them, and children.
function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes))
    if (name === "text") element.textContent = value;
    else element.setAttribute(name, value);
  element.append(...children);
  return element;
}
