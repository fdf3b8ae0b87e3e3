// The other parts of the page: figures, the selected tensor, the floor, the frontier.

function figures(plan, box) {
  const { budget, peak, unplanned, smallest, floor, resident } = plan.bytes;
  const add = (name, value, note, bad) => box.append(make("div", { class: `figure${bad ? " bad" : ""}` },
    make("div", { class: "name", text: name }), make("div", { class: "value", text: value }), make("div", { class: "note", text: note })));
  add("Budget", allowedText(budget), `${shareText(budget, unplanned)} of the unplanned peak`);
  add("Peak, predicted", bytesText(peak), peak > budget ? "ABOVE the budget" : `${shareText(peak, unplanned)} of ${bytesText(unplanned)} unplanned`, peak > budget);
  add("Added time, predicted", percentText(plan.overhead), `${secondsText(plan.seconds.planned)} against ${secondsText(plan.seconds.unplanned)}`);
  add("Bound on added time", plan.bound === null ? "none" : percentText(plan.bound), plan.bound === null ? "nothing is proven" : plan.bound_class);
  add("Smallest budget found", bytesText(smallest), `proven floor ${bytesText(floor)}`);
  const [most] = plan.resident_parts;
  add("Resident", bytesText(resident), most && plan.resident_parts.length > 1 ? `${bytesText(most[1])} of it ${most[0]}` : "before the step starts");
  for (const each of plan.measured)
    add(`Peak, measured ${each.label}`, bytesText(each.peak_bytes),
      each.overhead === null ? "" : `${percentText(Math.abs(each.overhead))} ${each.overhead < 0 ? "less" : "more"} time`, each.label === "planned" && each.peak_bytes > budget);
}

function legend(box, plan) {
  const item = (name, words, shade = 1) => {
    const swatch = make("span", { class: "swatch", "aria-hidden": "true" });
    swatch.style.background = `var(--${name})`;
    swatch.style.opacity = shade;
    box.append(make("li", {}, swatch, words));
  };
  const parts = plan.resident_parts;
  parts.forEach(([words, bytes], i) => item("resident", parts.length > 1 ? `${words}, resident: ${bytesText(bytes)}` : words, residentShade(i, parts.length)));
  CATEGORIES.slice(1).forEach(([name, words]) => item(name, words));
  const rules = [["warn", "budget", "solid"], ["soft", "floor: no plan without rewrites takes less", "dotted"], ["soft", "the step that is not drawn in colours", "solid"],
    ...(plan.measured.some(each => each.curve) ? [["good", "measured", "solid"]] : []),
    ...(plan.measured.length ? [["good", "peak, measured", "dashed"]] : [])];
  for (const [colour, words, style] of rules) {
    const rule = make("span", { class: "rule", "aria-hidden": "true" });
    rule.style.borderTopColor = `var(--${colour})`;
    rule.style.borderTopStyle = style;
    box.append(make("li", {}, rule, words));
  }
}

function detail(plan, box, b, show) {
  box.replaceChildren();
  if (b === null) {
    box.append(make("p", { class: "empty", text: "Select a tensor to see when it is in memory, who reads it and why the plan does what it does." }));
    return;
  }
  const op = plan.buffers.op[b], course = plan.planned;
  const list = make("dl", {});
  const add = (name, ...value) => list.append(make("div", {}, make("dt", { text: name }), make("dd", {}, ...value)));
  add("size", `${bytesText(plan.buffers.bytes[b])} (${plan.buffers.bytes[b].toLocaleString("en")} B)`);
  add("decision", plan.decisionOf(b));
  add("made by", op < 0 ? "no op: the backward starts from it" : `${plan.opName(op)} (${plan.targetOf(b)})`);
  if (plan.moduleOf(b)) add("module", plan.moduleOf(b));
  if (plan.sourceOf(b)) add("line", plan.sourceOf(b));
  add("unplanned", plan.unplannedTold(b));
  course.staysOf[b].forEach(s => add(course.isReloaded[s] ? "fetched back" : course.isLater[s] ? "recomputed" : "in memory", plan.stayTold(s)));
  for (const m of plan.movesOf.get(b) || [])
    if (course.kind[m] === "o") add("moves away", `at moment ${m}, ${secondsText(course.end[m] - course.begin[m])}`);
  add("at the peak", course.count && course.staysOf[b].some(s => course.stay_first[s] <= course.peak && course.stay_last[s] >= course.peak) ? "in memory" : "not in memory");
  const readers = plan.readers[b];
  add("read by", readers.length ? readers.slice(0, 6).map(r => plan.opName(r)).join(", ") + (readers.length > 6 ? ` and ${readers.length - 6} more` : "") : "no op");
  if (plan.why(b)) add("why", plan.why(b));
  box.append(make("h3", { text: plan.bufferName(b) }), list);
  const inputs = op < 0 ? [] : plan.ops.inputs[op];
  if (inputs.length) {
    const line = make("p", {}, "Made from ");
    inputs.slice(0, 8).forEach((each, i) => line.append(i ? ", " : "", tensorLink(plan, each, show)));
    if (inputs.length > 8) line.append(` and ${inputs.length - 8} more`);
    box.append(line);
  }
}

function tensorLink(plan, b, show) {
  const link = make("button", { type: "button", class: "link", text: plan.bufferName(b) });
  link.addEventListener("click", () => show(b));
  return link;
}

Plan.prototype.stayTold = function (s) {
  const course = this.planned, from = course.stay_first[s], to = course.stay_last[s];
  return `moments ${from.toLocaleString("en")} to ${to.toLocaleString("en")} of ${course.count.toLocaleString("en")}`;
};

Plan.prototype.lifeTold = function (b) {
  const stays = this.planned.staysOf[b];
  return stays.length ? stays.map(s => this.stayTold(s)).join("; then ") : "dropped at once";
};

Plan.prototype.unplannedTold = function (b) {
  const [stay] = this.unplanned.staysOf[b];
  if (stay === undefined) return "dropped at once";
  const { stay_first: first, stay_last: last, count } = this.unplanned;
  return `moments ${first[stay].toLocaleString("en")} to ${last[stay].toLocaleString("en")} of ${count.toLocaleString("en")}`;
};

function floorPart(plan, box, show) {
  const { op, above, moment, parts } = plan.floor, { reserve, floor } = plan.bytes;
  const at = moment === "end" ? "the end of the step" : moment === "boundary" ? "the end of the forward, before the backward begins"
    : op < plan.ops.name.length ? plan.opTold(op) : "nothing";
  box.append(make("p", { text: `No schedule with PyTorch's op order and boundary takes less than ${bytesText(floor)}: that is what has to be in memory at ${at}.` }));
  const resident = plan.resident_parts.map(([kind, bytes]) => [`resident: ${kind}`.replace("resident: resident", "resident"), bytes, []]);
  const rows = [...resident, ["reserve for the proof of the first step", reserve, []], ...parts].filter(each => each[1] > 0);
  if (!parts.length && above > 0) rows.push(["what the step has in memory there", above, []]);
  const others = ["other", "kept", "gradients", "again", "reloaded", "backward", "brief"];
  const colours = rows.map((_, i) => (i < resident.length ? "resident" : others[(i - resident.length) % others.length]));
  const shades = rows.map((_, i) => (i < resident.length ? residentShade(i, resident.length) : 1));
  const bar = make("div", { class: "bar", "aria-hidden": "true" });
  const table = make("table", { class: "plain" });
  rows.forEach(([words, bytes, buffers], i) => {
    const share = make("i", {});
    share.style.flex = `${bytes} 0 0`;
    share.style.background = `var(--${colours[i]})`;
    share.style.opacity = shades[i];
    bar.append(share);
    const swatch = make("span", { class: "dot", "aria-hidden": "true" });
    swatch.style.background = `var(--${colours[i]})`;
    swatch.style.opacity = shades[i];
    const named = make("td", {}, swatch, words);
    buffers.forEach((b, j) => named.append(j ? ", " : ": ", tensorLink(plan, b, show)));
    table.append(make("tr", {}, named, make("td", { class: "number", text: bytesText(bytes) })));
  });
  box.append(bar, table);
}

function frontierPart(plan, box) {
  box.append(frontierDrawing(plan));
  const anyMeasured = plan.points.some(each => each.measured_peak_bytes !== null);
  const head = ["", "peak", "added time", "bound", ...(anyMeasured ? ["peak measured", "time measured"] : [])];
  const table = make("table", { class: "plain" }, make("tr", {}, ...head.map((each, i) => make("th", { scope: "col", class: i ? "number" : "", text: each }))));
  const optional = (value, text) => (value === null ? "" : text(value));
  for (const point of plan.points) {
    const name = point.planner ? `${point.planner} within ${allowedText(point.budget_bytes)}` : "unplanned";
    const cells = [bytesText(point.peak_bytes), percentText(point.overhead), optional(point.bound, percentText),
      ...(anyMeasured ? [optional(point.measured_peak_bytes, bytesText), optional(point.measured_overhead, percentText)] : [])];
    table.append(make("tr", { class: point.chosen ? "chosen" : "" }, make("td", { text: name + (point.chosen ? " (this plan)" : "") }),
      ...cells.map(text => make("td", { class: "number", text }))));
  }
  box.append(make("div", { class: "wide" }, table));
}

function frontierDrawing(plan) {
  const width = 560, height = 270, left = 60, right = 16, top = 14, bottom = 40;
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Peak against added time; the table below has the numbers" });
  const most = 1.08 * Math.max(...plan.points.map(each => each.peak_bytes), 1);
  const slowest = 1.15 * Math.max(...plan.points.map(each => Math.max(each.overhead, each.bound || 0)), 0.01);
  const x = bytes => left + (bytes / most) * (width - left - right), y = share => height - bottom - (share / slowest) * (height - top - bottom);
  const put = (tag, attributes, text) => { const made = element(tag, attributes); if (text) made.textContent = text; svg.append(made); return made; };
  for (const tick of ticks(slowest, 4, false)) {
    put("line", { x1: left, x2: width - right, y1: y(tick), y2: y(tick), stroke: "var(--line)" });
    put("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, `${+(tick * 100).toPrecision(3)} %`);
  }
  for (const tick of ticks(most, 5, true)) put("text", { x: x(tick), y: height - bottom + 16, "text-anchor": x(tick) > width - 40 ? "end" : "middle" }, bytesText(tick).replace(/\.00 /, " "));
  put("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, "peak of the step, resident part included");
  for (const [name, bytes] of [["floor", plan.bytes.floor], ["smallest", plan.bytes.smallest]]) {
    if (bytes > most) continue;
    put("line", { x1: x(bytes), x2: x(bytes), y1: top, y2: height - bottom, stroke: "var(--soft)", "stroke-dasharray": name === "floor" ? "2 4" : "6 4" });
    put("text", { x: x(bytes) + (name === "floor" ? -4 : 4), y: top + 8, "text-anchor": name === "floor" ? "end" : "start" }, name);
  }
  for (const point of plan.points) {
    const name = `${point.planner || "unplanned"}: ${bytesText(point.peak_bytes)}, ${percentText(point.overhead)}`;
    if (point.bound !== null) put("line", { x1: x(point.peak_bytes) - 5, x2: x(point.peak_bytes) + 5, y1: y(point.bound), y2: y(point.bound), stroke: "var(--warn)", "stroke-width": 2 });
    const mark = put("circle", { cx: x(point.peak_bytes), cy: y(point.overhead), r: point.chosen ? 6 : 4,
      fill: point.chosen ? "var(--accent)" : point.planner ? "var(--brief)" : "var(--resident)", stroke: "var(--card)" });
    const title = element("title", {});
    title.textContent = name;
    mark.append(title);
    if (point.measured_peak_bytes !== null && point.measured_overhead !== null && point.measured_overhead <= slowest)
      put("rect", { x: x(point.measured_peak_bytes) - 3, y: y(Math.max(point.measured_overhead, 0)) - 3, width: 6, height: 6, fill: "none", stroke: "var(--good)", "stroke-width": 1.5 });
  }
  return svg;
}

function element(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
