// Puts the page together: the timeline leads to the table, and the table to the timeline.

function choice(box, options, chosen, change) {
  const buttons = options.map(([value, words]) => {
    const button = make("button", { type: "button", role: "radio", "aria-checked": String(value === chosen), text: words });
    button.tabIndex = value === chosen ? 0 : -1;
    button.addEventListener("click", () => {
      buttons.forEach(each => { each.setAttribute("aria-checked", String(each === button)); each.tabIndex = each === button ? 0 : -1; });
      change(value);
    });
    return button;
  });
  box.addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    const next = buttons[(buttons.indexOf(document.activeElement) + step + buttons.length) % buttons.length];
    event.preventDefault();
    next.focus();
    next.click();
  });
  box.append(...buttons);
}

function start() {
  const $ = id => document.getElementById(id);
  const plan = new Plan(JSON.parse($("data").textContent));
  figures(plan, $("figures"));
  legend($("legend"), plan);
  const select = b => {
    chart.select(b);
    table.show(b);
    detail(plan, $("detail"), b, select);
  };
  const chart = new Chart(plan, { memory: $("memory"), lanes: $("lanes"), box: $("chart") }, {
    moved: text => { $("readout").textContent = text; },
    pinned: (moment, which) => table.at(moment, which),
  });
  const table = new Table(plan,
    { head: $("head"), body: $("body"), space: $("space"), count: $("count"), search: $("search"), chips: $("chips") },
    { selected: select, cleared: () => chart.pin(null) });
  choice($("which"), [["planned", "Planned"], ["unplanned", "Unplanned"]], "planned", value => chart.choose(value, chart.axis));
  choice($("axis"), [["time", "By time"], ["order", "By order"]], chart.axis, value => chart.choose(chart.which, value));
  $("zoom-in").addEventListener("click", () => chart.zoom(0.5));
  $("zoom-out").addEventListener("click", () => chart.zoom(2));
  $("zoom-all").addEventListener("click", () => chart.look(0, 1));
  $("readout").textContent = chart.told();
  detail(plan, $("detail"), null, select);
  floorPart(plan, $("floor"), select);
  frontierPart(plan, $("frontier"));
  const redraw = () => { chart.draw(); table.draw(); };
  window.addEventListener("resize", redraw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  chart.drawNow();
  document.documentElement.dataset.ready = "yes";
  window.ebbtide = { plan, chart, table };
}

start();
