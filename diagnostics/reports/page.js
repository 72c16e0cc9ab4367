"use strict";
/* Draws the runs in `data`, or polls the server for them. All texts of runs are set as text nodes;
   Plotly's labels get escaped texts. */
const COLORS = [
  "#3b78e7",
  "#e0692f",
  "#1f9d78",
  "#b04fb0",
  "#b58a12",
  "#1795b3",
  "#d1435f",
  "#7a8394",
];
const PHASES = { train: "solid", val: "dash", test: "dot" };
const SYSTEM = /_per_s$|_share$|_gib$|^mfu$|^cpu_cores$|^slowest_rank$/;
/* The lines of a run's parameter groups, if several runs are shown. */
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const PARTS = [
  ["steps", "training steps"],
  ["data", "waiting for data"],
  ["hooks", "hooks"],
  ["checkpoint", "writing checkpoints"],
  ["evaluation", "evaluation"],
];
const PLACES = new Set(["run_dir", "resume", "import_from"]); // differ between all runs
const POLL_MS = 2000;
const $ = (id) => document.getElementById(id);
const embedded = JSON.parse($("data").textContent);
const live = embedded === null;
const known = new Map(); // id -> the entry in the list of runs
const details = new Map(); // id -> data of the page
const stamps = new Map(); // id -> the state of the files of that data
const shown = new Set();
const slots = new Map(); // id -> the index of its color
const sections = new Map();
const states = new Map(); // what a section was drawn from
let onlyDifferences = true,
  settingFilter = "";

function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes))
    if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
  element.append(
    ...children
      .flat(Infinity)
      .filter((child) => child != null && child !== false && child !== "")
      .map((child) => (child instanceof Node ? child : String(child))),
  );
  return element;
}
const escaped = (text) =>
  String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const number = (value) => (value == null ? "–" : Number(value.toPrecision(5)).toString());
const plural = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const runs = () =>
  [...known.keys()].filter((id) => shown.has(id) && details.has(id)).map((id) => details.get(id));
/* A run gets the first free color when it is shown. */
function color(id) {
  if (!shown.has(id)) {
    slots.delete(id);
    return css("--line");
  }
  const used = new Set([...slots].filter(([other]) => shown.has(other)).map(([, slot]) => slot));
  if (!slots.has(id))
    slots.set(
      id,
      [...Array(used.size + 1).keys()].find((slot) => !used.has(slot)),
    );
  return COLORS[slots.get(id) % COLORS.length];
}
const bytes = (n) =>
  n >= 2 ** 30
    ? `${(n / 2 ** 30).toFixed(2)} GiB`
    : n >= 2 ** 20
      ? `${(n / 2 ** 20).toFixed(1)} MiB`
      : `${Math.ceil(n / 1024)} KiB`;
const duration = (s) =>
  s >= 3600
    ? `${Math.floor(s / 3600)} h ${Math.round((s % 3600) / 60)} min`
    : s >= 100
      ? `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`
      : `${s.toPrecision(3)} s`;
const runHead = (run) =>
  h(
    "th",
    { scope: "col" },
    h("span", { class: "swatch", style: `--run:${color(run.id)};display:inline-block` }),
    ` ${run.id}`,
  );

function section(key, title, content, note) {
  if (!sections.has(key)) {
    const place = h("section", { id: key, "aria-label": title });
    $("main").append(place);
    document.querySelector("nav").append(h("a", { href: `#${key}` }, title));
    sections.set(key, place);
  }
  const parts = [h("h2", {}, title)];
  if (note) parts.push(h("p", { class: "note" }, note));
  sections.get(key).replaceChildren(...parts, ...content);
}
const missing = (what, of, why) =>
  of.length ? `${what} of ${of.map((run) => run.id).join(", ")}: not recorded (${why}).` : "";
const table = (label, head, rows) =>
  h(
    "div",
    { class: "card" },
    h(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": label },
      h("table", {}, head && h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows)),
    ),
  );
const heads = (...names) => names.map((name) => h("th", { scope: "col" }, name));

/* Exponential moving average without the bias towards its first value, as in TensorBoard. */
function smooth(values, weight) {
  let total = 0,
    count = 0;
  return values.map((value) => {
    if (value === null) return null;
    total = total * weight + (1 - weight) * value;
    count += 1;
    return total / (1 - weight ** count);
  });
}

function layout(extra) {
  const axis = {
    gridcolor: css("--line"),
    zeroline: false,
    linecolor: css("--line"),
    tickfont: { size: 11 },
    automargin: true,
  };
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: css("--muted"), family: "system-ui, sans-serif", size: 12 },
    margin: { l: 44, r: 8, t: 22, b: 34 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--muted"), activecolor: css("--accent") },
    hovermode: "x unified",
    showlegend: false,
    hoverlabel: {
      bgcolor: css("--card"),
      bordercolor: css("--line"),
      font: { color: css("--text") },
    },
    legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", font: { size: 11 } },
    uirevision: "keep",
    ...extra,
    xaxis: { ...axis, ...extra.xaxis },
    yaxis: { ...axis, ...extra.yaxis },
  };
}
const CONFIG = {
  responsive: true,
  displaylogo: false,
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
};

function traces(curves, several) {
  const weight = Number($("smoothing").value),
    axis = $("axis").value,
    result = [];
  const labels = [...new Set(curves.map(({ label }) => label))];
  for (const { run, curve, label } of curves) {
    const group = labels.indexOf(label);
    const at = several
      ? color(run.id)
      : COLORS[
          labels.length > 1
            ? group % COLORS.length
            : Math.max(0, Object.keys(PHASES).indexOf(curve.phase))
        ];
    const base = {
      x: curve[axis],
      mode: curve.value.length < 40 ? "lines+markers" : "lines",
      marker: { size: 5 },
    };
    const line = {
      color: at,
      width: 1.8,
      dash:
        several && labels.length > 1
          ? DASHES[group % DASHES.length]
          : (PHASES[curve.phase] ?? "solid"),
    };
    const name = escaped([several && run.id, label || curve.phase].filter(Boolean).join(" "));
    const isSmoothed = weight > 0 && curve.value.length > 2;
    if (isSmoothed)
      result.push({
        ...base,
        y: curve.value,
        line: { ...line, width: 1 },
        opacity: 0.25,
        hoverinfo: "skip",
        mode: "lines",
        showlegend: false,
      });
    const values = isSmoothed ? smooth(curve.value, weight) : curve.value;
    const raw = isSmoothed ? " (recorded %{customdata:.6~g})" : "";
    result.push({
      ...base,
      y: values,
      customdata: curve.value,
      line,
      name,
      hovertemplate: `%{y:.6~g}${raw}`,
    });
  }
  return result;
}

function drawCharts(key, title, wanted, empty) {
  const charts = new Map(),
    visible = runs();
  for (const run of visible)
    for (const curve of run.curves.filter((curve) => SYSTEM.test(curve.name) === wanted)) {
      const isRate = curve.name.startsWith("lr/");
      const chart = isRate ? "lr" : curve.name;
      if (!charts.has(chart)) charts.set(chart, []);
      charts.get(chart).push({ run, curve, label: isRate ? curve.name.slice(3) : "" });
    }
  const place = sections.get(key);
  const before = new Map(
    [...(place?.querySelectorAll(".chart") ?? [])].map((div) => [
      div.dataset.name,
      div.closest("figure"),
    ]),
  );
  const figures = [...charts.keys()].map(
    (name) =>
      before.get(name) ??
      h(
        "figure",
        { class: "card" },
        h("h3", {}, name),
        h("div", { class: "chart", "data-name": name }),
        h("figcaption"),
      ),
  );
  if (!figures.length || !place || [...before.keys()].join("\n") !== [...charts.keys()].join("\n"))
    section(
      key,
      title,
      figures.length ? [h("div", { class: "grid" }, figures)] : [],
      figures.length ? "" : empty,
    );
  for (const [index, [name, curves]] of [...charts].entries()) {
    const drawn = traces(curves, visible.length > 1);
    const axis = {
      title: {
        text: $("axis").value === "step" ? "step" : "seconds since the first record",
        font: { size: 11 },
        standoff: 4,
      },
    };
    const settings = {
      xaxis: axis,
      yaxis: { type: $("log").checked ? "log" : "linear" },
      showlegend: curves.length > 1,
    };
    const [, chart, caption] = figures[index].children;
    chart.setAttribute("role", "img");
    chart.setAttribute(
      "aria-label",
      `${name}: ${curves.map(({ run, curve }) => `${run.id} ${curve.phase}, last value ${number(curve.value.at(-1))}`).join("; ")}`,
    );
    Plotly.react(chart, drawn, layout(settings), CONFIG);
    const notes = curves
      .filter(({ curve }) => curve.not_finite.length)
      .map(
        ({ run, curve }) =>
          `${run.id}, ${curve.phase}: not finite at step ${curve.not_finite.join(", ")}`,
      );
    if (curves.some(({ curve }) => curve.points > curve.step.length))
      notes.push(
        `up to ${Math.max(...curves.map(({ curve }) => curve.points)).toLocaleString("en")} records, of which extremes are drawn`,
      );
    caption.textContent = notes.join("; ");
  }
}

function drawOverview() {
  section("overview", "Overview", [
    h(
      "div",
      { class: "grid" },
      runs().map((run) => {
        const metrics = Object.entries(run.metrics)
          .filter(([name]) => !name.startsWith("train/"))
          .slice(0, 4);
        const speed =
          run.curves.find((curve) => curve.name === "tokens_per_s") ??
          run.curves.find((curve) => curve.name === "samples_per_s");
        const last = run.curves.reduce(
          (most, curve) => Math.max(most, curve.phase === "train" ? curve.step.at(-1) : 0),
          0,
        );
        const facts = [
          ["step", run.environment.max_steps ? `${last} of ${run.environment.max_steps}` : last],
          ...metrics.map(([name, one]) =>
            one.best === null ? [`last ${name}`, number(one.last)] : [`best ${name}`, number(one.best)],
          ),
        ];
        if (speed) facts.push([speed.name.replace("_per_s", "/s"), number(speed.value.at(-1))]);
        if (run.environment.wrapper)
          facts.push(
            ["wrapper", run.environment.wrapper],
            ["ranks", run.environment.ranks?.length ?? "–"],
          );
        return h(
          "article",
          { class: "card" },
          h(
            "h3",
            {},
            h("span", { class: "swatch", style: `--run:${color(run.id)};display:inline-block` }),
            ` ${run.id} `,
            h("span", { class: `status ${run.status}` }, run.status),
          ),
          run.reason && h("p", { class: run.status === "failed" ? "failed" : "note" }, run.reason),
          h(
            "dl",
            {},
            facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
          ),
        );
      }),
    ),
  ]);
}

function drawMetrics() {
  const visible = runs(),
    names = [...new Set(visible.flatMap((run) => Object.keys(run.metrics)))];
  const rows = names.map((name) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, name),
      visible.map((run) => {
        const one = run.metrics[name];
        return h(
          "td",
          {},
          one
            ? [
                h("span", { class: "value" }, one.best === null ? "direction unknown" : number(one.best)),
                one.best !== null && ` at step ${one.best_step}`,
                h("small", {}, `last ${number(one.last)} at step ${one.last_step}`),
              ]
            : "–",
        );
      }),
    ),
  );
  section(
    "metrics",
    "Metrics",
    rows.length
      ? [table("Metrics", [...heads("best and last"), ...visible.map(runHead)], rows)]
      : [],
    rows.length
      ? ""
      : "No records yet: the first one is written after train.log_every_steps updates.",
  );
}

function comparison(key, title, label, valuesOf, originOf, note) {
  const visible = runs(),
    names = [...new Set(visible.flatMap((run) => Object.keys(valuesOf(run))))];
  const rows = names.map((name) => {
    const values = visible.map((run) => valuesOf(run)[name]);
    const differs = new Set(values).size > 1;
    return {
      name,
      differs,
      row: h(
        "tr",
        { class: differs ? "differs" : false },
        h("th", { scope: "row" }, name),
        visible.map((run, at) =>
          h(
            "td",
            {},
            h("span", { class: "value" }, values[at] ?? "–"),
            originOf(run, name) && h("small", {}, originOf(run, name)),
          ),
        ),
      ),
    };
  });
  const content = [];
  if (key === "config") {
    const box = h("input", { type: "checkbox", id: "differences", checked: onlyDifferences });
    const search = h("input", {
      type: "search",
      id: "settings",
      placeholder: "Filter settings",
      "aria-label": "Filter settings",
      value: settingFilter,
    });
    box.addEventListener("change", () => {
      onlyDifferences = box.checked;
      drawConfig();
      $("differences")?.focus();
    });
    search.addEventListener("input", () => {
      settingFilter = search.value;
      drawConfig();
      const field = $("settings");
      field.focus();
      field.setSelectionRange(settingFilter.length, settingFilter.length);
    });
    content.push(
      h(
        "div",
        { class: "tools" },
        visible.length > 1 && h("label", {}, box, " Only differences"),
        search,
      ),
    );
  }
  const wanted = rows.filter(
    (row) =>
      (key !== "config" ||
        !onlyDifferences ||
        visible.length < 2 ||
        (row.differs && !PLACES.has(row.name))) &&
      (key !== "config" || row.name.includes(settingFilter)),
  );
  if (wanted.length)
    content.push(
      table(
        label,
        [...heads(""), ...visible.map(runHead)],
        wanted.map((row) => row.row),
      ),
    );
  else if (rows.length)
    content.push(
      h("p", { class: "note" }, settingFilter ? "No setting matches." : "No setting differs."),
    );
  section(key, title, content, note);
}
const drawConfig = () =>
  comparison(
    "config",
    "Settings",
    "Settings",
    (run) => run.settings,
    (run, name) => run.origins[name],
    missing(
      "Settings",
      runs().filter((run) => !Object.keys(run.settings).length),
      "a Runner that was built from objects has no config.yaml",
    ),
  );

function drawPhases() {
  const timed = runs().filter((run) => run.phases.training);
  const seconds = (run) => ({
    ...run.phases,
    steps: Math.max(0, run.phases.training - (run.phases.data ?? 0) - (run.phases.hooks ?? 0)),
    hooks: Math.max(0, (run.phases.hooks ?? 0) - (run.phases.checkpoint ?? 0)),
  });
  const chart = h("div", { class: "wide", role: "img", "aria-label": "Seconds in each phase" });
  section(
    "phases",
    "Phase times",
    timed.length
      ? [
          h(
            "figure",
            { class: "card" },
            chart,
            h(
              "figcaption",
              {},
              "Time of rank 0 since the last start of the training. On a GPU, the time of a kernel counts in the phase in which the host waits for it.",
            ),
          ),
        ]
      : [],
    missing(
      "Phase times",
      runs().filter((run) => !run.phases.training),
      "they need hooks.run_info and hooks.throughput",
    ),
  );
  if (!timed.length) return;
  const bars = PARTS.map(([part, name], at) => {
    const values = timed.map((run) => seconds(run)[part] ?? 0);
    const shares = timed.map(
      (run, of) => values[of] / PARTS.reduce((sum, [other]) => sum + (seconds(run)[other] ?? 0), 0),
    );
    return {
      type: "bar",
      orientation: "h",
      name,
      y: timed.map((run) => escaped(run.id)),
      x: values,
      marker: { color: COLORS[at] },
      textposition: "inside",
      insidetextanchor: "middle",
      text: shares.map((share) => (share >= 0.04 ? `${(100 * share).toFixed(0)}%` : "")),
      hovertemplate: values.map(
        (value, of) =>
          `${name}: ${duration(value)}, ${(100 * shares[of]).toFixed(1)}%<extra></extra>`,
      ),
      textfont: { color: "#fff" },
    };
  });
  Plotly.newPlot(
    chart,
    bars,
    layout({
      barmode: "stack",
      hovermode: "closest",
      showlegend: true,
      height: (innerWidth < 640 ? 230 : 150) + 38 * timed.length,
      bargap: 0.35,
      xaxis: { title: { text: "seconds", font: { size: 11 } } },
      yaxis: { autorange: "reversed", type: "category" },
      margin: { l: 44, r: 8, t: 22, b: 34 },
    }),
    CONFIG,
  );
}

function coordinates(mesh, rank) {
  const parts = [];
  for (const [name, size] of Object.entries(mesh ?? {}).reverse()) {
    parts.unshift(`${name} ${rank % size}`);
    rank = Math.floor(rank / size);
  }
  return parts.join(", ");
}

function drawPlacement() {
  const placed = runs().filter((run) => Array.isArray(run.environment.ranks));
  const cards = placed.map((run) => {
    const { mesh, ranks, groups, wrapper, hosts, parameters, trainable } = run.environment;
    const axes = Object.entries(mesh ?? {})
      .map(([name, size]) => `${name} ${size}`)
      .join(" × ");
    const names = Object.keys(groups ?? {});
    const chart = h("div", {
      class: "wide",
      role: "img",
      "aria-label": `Share of each group of parameters on each rank of ${run.id}`,
    });
    const rows = ranks.map((one, rank) =>
      h(
        "tr",
        {},
        h("th", { scope: "row" }, rank),
        [
          one.host,
          coordinates(mesh, rank),
          `${one.device} (${one.device_name})`,
          one.threads,
          Object.values(one.held ?? {})
            .reduce((sum, n) => sum + n, 0)
            .toLocaleString("en"),
        ].map((value) => h("td", {}, value)),
      ),
    );
    const card = h(
      "figure",
      { class: "card" },
      h("h3", {}, run.id),
      h(
        "p",
        { class: "note" },
        `${wrapper} · ${plural(ranks.length, "rank")} on ${plural(hosts, "host")} · mesh ${axes} · ${parameters?.toLocaleString("en")} parameters, ${trainable?.toLocaleString("en")} trainable`,
      ),
      names.length ? chart : "",
      h(
        "details",
        {},
        h("summary", {}, "Ranks"),
        h(
          "div",
          { class: "scroll", tabindex: 0, role: "region", "aria-label": "Ranks" },
          h(
            "table",
            {},
            h(
              "thead",
              {},
              h("tr", {}, heads("rank", "host", "position", "device", "threads", "parameters")),
            ),
            h("tbody", {}, rows),
          ),
        ),
      ),
    );
    const draw = () =>
      names.length &&
      Plotly.newPlot(
        chart,
        [
          {
            type: "heatmap",
            x: names.map(escaped),
            y: ranks.map((_, rank) => `rank ${rank}`),
            xgap: 2,
            ygap: 2,
            zmin: 0,
            zmax: 1,
            z: ranks.map((one) =>
              names.map((name) => (one.held?.[name] ?? 0) / (groups[name] || 1)),
            ),
            colorscale: [
              [0, css("--back")],
              [1, color(run.id)],
            ],
            colorbar: {
              title: { text: "share", font: { size: 11 } },
              thickness: 10,
              tickformat: ".0%",
            },
            customdata: ranks.map((one) =>
              names.map(
                (name) =>
                  `${(one.held?.[name] ?? 0).toLocaleString("en")} of ${(groups[name] ?? 0).toLocaleString("en")}`,
              ),
            ),
            texttemplate: "%{z:.0%}",
            hovertemplate: "%{y}, %{x}: %{customdata} parameters (%{z:.0%})<extra></extra>",
          },
        ],
        layout({
          hovermode: "closest",
          height: Math.min(640, 130 + 26 * ranks.length),
          yaxis: { autorange: "reversed", type: "category" },
          xaxis: { type: "category" },
        }),
        CONFIG,
      );
    return { card, draw };
  });
  section(
    "placement",
    "Parallelism and placement",
    cards.map(({ card }) => card),
    missing(
      "The placement",
      runs().filter((run) => !Array.isArray(run.environment.ranks)),
      "it needs hooks.run_info",
    ),
  );
  cards.forEach(({ draw }) => draw());
}

function drawLists() {
  const withThem = runs().filter((run) => run.checkpoints.length);
  section(
    "checkpoints",
    "Checkpoints",
    withThem.length
      ? [
          table(
            "Checkpoints",
            heads("run", "checkpoint", "step", "epoch", "size", "saved because", ""),
            withThem.flatMap((run) =>
              run.checkpoints.map((one) =>
                h(
                  "tr",
                  {},
                  [
                    run.id,
                    one.name,
                    one.step,
                    one.epoch,
                    bytes(one.bytes),
                    one.reason,
                    one.best ? "best" : "",
                  ].map((value) => h("td", {}, value ?? "")),
                ),
              ),
            ),
          ),
        ]
      : [],
    withThem.length ? "" : "No checkpoints.",
  );
  comparison(
    "environment",
    "Environment",
    "Environment",
    (run) =>
      Object.fromEntries(
        Object.entries(run.environment)
          .filter(([name]) => !["ranks", "groups", "higher_is_better", "max_steps"].includes(name))
          .map(([name, value]) => [
            name,
            value !== null && typeof value === "object"
              ? JSON.stringify(value)
              : value === null
                ? undefined
                : String(value),
          ]),
      ),
    () => "",
    missing(
      "The environment",
      runs().filter((run) => !Object.keys(run.environment).length),
      "it needs hooks.run_info",
    ),
  );
  const warned = runs().filter((run) => run.warnings.length);
  section(
    "warnings",
    "Warnings",
    warned.length
      ? [
          table(
            "Warnings",
            heads("run", "step", "rank", "text"),
            warned.flatMap((run) =>
              run.warnings.map((one) =>
                h(
                  "tr",
                  { class: one.event === "error" ? "error" : false },
                  [run.id, one.step, one.rank, one.text].map((value) => h("td", {}, value ?? "")),
                ),
              ),
            ),
          ),
        ]
      : [],
    warned.length ? "" : "None recorded.",
  );
}

function drawPicker() {
  const wanted = $("filter").value.toLowerCase();
  const labels = [...known]
    .filter(([id]) => id.toLowerCase().includes(wanted))
    .map(([id, run]) => {
      const box = h("input", { type: "checkbox", checked: shown.has(id), "data-run": id });
      box.addEventListener("change", async () => {
        shown[box.checked ? "add" : "delete"](id);
        if (live) await load(id);
        draw();
      });
      const progress =
        run.step != null ? ` ${run.step}${run.max_steps ? `/${run.max_steps}` : ""}` : "";
      return h(
        "label",
        { title: id },
        box,
        h("span", { class: "swatch", style: `--run:${color(id)}` }),
        h("span", {}, id),
        h("span", { class: `status ${run.status}` }, run.status + progress),
      );
    });
  const focused = document.activeElement?.dataset?.run;
  $("runs").replaceChildren(...labels);
  if (focused !== undefined) document.querySelector(`[data-run="${CSS.escape(focused)}"]`)?.focus();
  $("count").textContent = `(${runs().length} of ${known.size})`;
}

function drawAllCharts() {
  $("smoothed").textContent = $("smoothing").value;
  drawCharts("curves", "Curves", false, "No records yet: metrics.jsonl is missing or empty.");
  drawCharts(
    "system",
    "Speed and system",
    true,
    "No speeds recorded: they need hooks.throughput; memory and CPU need hooks.system.",
  );
}

/* Draw a section again only if its data has changed: drawing closes its open parts. */
function redraw(key, state, drawSection) {
  const text = JSON.stringify(state);
  if (states.get(key) !== text) drawSection();
  states.set(key, text);
}

function draw() {
  const visible = runs(),
    of = (...names) =>
      visible.map((run) => [run.id, color(run.id), ...names.map((name) => run[name])]);
  drawPicker();
  drawOverview();
  drawMetrics();
  drawAllCharts();
  redraw("phases", of("phases"), drawPhases);
  redraw("config", of("settings", "origins"), drawConfig);
  redraw("placement", of("environment"), drawPlacement);
  redraw("lists", of("checkpoints", "environment", "warnings"), drawLists);
}

/* Polling. A run is fetched again only if its files have changed. */
async function load(id) {
  const reply = await fetch(`api/run?${new URLSearchParams({ id, stamp: stamps.get(id) ?? "" })}`);
  if (reply.status !== 200) return false;
  const { stamp, run } = await reply.json();
  stamps.set(id, stamp);
  details.set(id, run);
  return true;
}

async function poll() {
  try {
    const entries = await (await fetch("api/runs")).json();
    const isFirst = known.size === 0;
    known.clear();
    entries.forEach((entry) => known.set(entry.id, entry));
    if (isFirst)
      [...entries]
        .sort((a, b) => b.time - a.time)
        .slice(0, 2)
        .forEach((entry) => shown.add(entry.id));
    const changed = await Promise.all([...shown].filter((id) => known.has(id)).map(load));
    $("notice").hidden = true;
    $("subtitle").textContent = `live · ${plural(entries.length, "run")}`;
    if (changed.some(Boolean) || isFirst) draw();
    else drawPicker();
  } catch (error) {
    $("notice").hidden = false;
    $("notice").textContent = "The server does not answer: the page shows the last state.";
  }
}

$("smoothing").addEventListener("input", drawAllCharts);
$("axis").addEventListener("change", drawAllCharts);
$("log").addEventListener("change", drawAllCharts);
$("filter").addEventListener("input", drawPicker);
new ResizeObserver(() =>
  document.querySelectorAll(".js-plotly-plot").forEach((chart) => Plotly.Plots.resize(chart)),
).observe($("main"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  states.clear();
  draw();
});
if (matchMedia("(max-width: 40rem)").matches) $("picker").open = false;
if (live) {
  $("title").textContent = "runs";
  $("filter").hidden = false;
  const repeat = async () => {
    if (!document.hidden) await poll();
    setTimeout(repeat, POLL_MS);
  };
  repeat();
} else {
  for (const run of embedded.runs) {
    known.set(run.id, run);
    details.set(run.id, run);
    shown.add(run.id);
  }
  $("subtitle").textContent =
    `${plural(embedded.runs.length, "run")} · written ${embedded.written} by stepwrap ${embedded.version}`;
  document.title = `stepwrap report: ${embedded.runs.map((run) => run.id).join(", ")}`;
  draw();
}
