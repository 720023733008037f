"use strict";
// The timeline tab: a step on lanes, what is inside of one micro-batch, and a table of its groups.
(() => {
  const { el, ms, bytes, count, table, plot, colour, code, words } = fxpar;
  const PART = { F: "forward", B: "backward", I: "input_part", W: "weight_part" };
  const KERNELS = { product: "matrix products", attention: "attention", memory: "other kernels" };
  const ROW = 24; // px of a lane
  // kind -> [what the legend says, colour, pattern]; kinds differ by text or pattern too, never by colour alone.
  const KINDS = {
    switch: ["switch of weights", () => colour.send, "/"],
    micro_batch: ["micro-batch", () => colour.compute, ""],
    F: ["F forward", () => mixed(45), ""],
    B: ["B backward", () => mixed(80), ""],
    I: ["I backward, inputs", () => mixed(65), ""],
    W: ["W backward, weights", () => mixed(30), "."],
    wait: ["waits for a stage", () => mixed(12), "x"],
    prologue: ["prologue", () => colour.all_gather, "|"],
    epilogue: ["epilogue", () => colour.all_reduce, "|"],
    reduce: ["reduction of gradients", () => colour.reduce_scatter, "\\"],
    optimizer: ["optimizer", () => style("--accent"), "-"],
  };
  // Spans that are long enough for a seam between two of them; seams would hide what is thin.
  const THICK = new Set(["micro_batch", "F", "B", "I", "W", "groups", "modules", "compute"]
    .map((kind) => KINDS[kind]?.[0] ?? kind));
  const LANE = 0, KIND = 1, GROUP = 2, START = 3, LENGTH = 4, MICRO = 5, STAGE = 6; // of a span
  const MODULE = 0, WHAT = 1, AXIS = 2, BACKWARD = 3, CALLS = 4, MS = 5, BYTES = 6; // of a row inside
  const state = { step: 0, chosen: null, strategy: null, sameScale: false };

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const at = (term, [tokens, squares]) => term[0] + term[1] * tokens + term[2] * squares;

  // The colour of compute, lighter or darker towards the ink of the page.
  function mixed(percent) {
    const parse = (text) => text.match(/[0-9a-f]{2}/gi).map((part) => parseInt(part, 16));
    const [from, to] = [parse(style("--sunken")), parse(style("--soft"))];
    return `rgb(${from.map((value, i) => Math.round(value + ((to[i] - value) * percent) / 100)).join(",")})`;
  }

  // ---------------------------------------------------------------------------------------------------- the step
  // [tokens, sum of squares, sequences] of what a span works on; null where it has none.
  function sizes(step, timeline, span) {
    if (span[GROUP] < 0 || span[MICRO] < 0 || span[KIND] === "wait") return null;
    return step.groups[span[GROUP]].replicas[timeline.lanes[span[LANE]].replicas[span[GROUP]]][span[MICRO]] ?? null;
  }

  // Of all rows, of which `size` is one where their number is fixed in the graph.
  function sizeText({ rows }, [tokens, , sequences]) {
    return `${count(rows * tokens)} tokens in ${count(rows * sequences)} sequence${rows * sequences === 1 ? "" : "s"}`;
  }

  // `F3`; `F3@2` where ranks run several stages.
  function label(span, chunked) {
    if (span[KIND] === "micro_batch") return String(span[MICRO]);
    if (!(span[KIND] in PART)) return KINDS[span[KIND]][0];
    return `${span[KIND]}${span[MICRO]}${chunked.has(span[GROUP]) ? `@${span[STAGE]}` : ""}`;
  }

  // The groups in which a lane runs several stages.
  function chunkedGroups(timeline) {
    const first = new Map(), found = new Set();
    for (const span of timeline.spans.filter((one) => one[KIND] in PART)) {
      const key = `${span[LANE]} ${span[GROUP]}`;
      if (!first.has(key)) first.set(key, span[STAGE]);
      if (first.get(key) !== span[STAGE]) found.add(span[GROUP]);
    }
    return found;
  }

  const groupName = (group) => (group.label ? `${group.label}  ${group.strategy}` : group.strategy);

  function hover(step, timeline, span) {
    const lines = [`<b>${KINDS[span[KIND]][0]}${span[MICRO] >= 0 ? ` ${span[MICRO]}` : ""}</b>   ${ms(span[LENGTH])}`];
    const group = step.groups[span[GROUP]];
    if (span[STAGE] >= 0) lines.push(`stage ${span[STAGE]}`);
    const size = sizes(step, timeline, span);
    if (size) lines.push(sizeText(group, size));
    else if (span[KIND] in PART || span[KIND] === "micro_batch") lines.push("idle: keeps the others company");
    if (group) lines.push(groupName(group));
    if (span[KIND] === "switch") lines.push(`${bytes(group.switch_bytes)} moved by all ranks`);
    if (span[KIND] === "reduce") lines.push(`${bytes(group.reduce_bytes)} sent by all ranks`);
    lines.push(`from ${ms(span[START])} on ${timeline.lanes[span[LANE]].name}`);
    return lines.join("<br>");
  }

  function bars(name, spans, fill, pattern, extra = {}) {
    return {
      type: "bar", orientation: "h", name, offset: -0.43, width: 0.86, hoverinfo: "text", textangle: 0,
      insidetextanchor: "middle", textposition: "inside", constraintext: "inside", cliponaxis: true,
      marker: { color: fill, line: { color: style("--surface"), width: THICK.has(name) ? 1 : 0 },
        pattern: { shape: pattern, size: 6, solidity: 0.25, fgcolor: style("--surface"), fillmode: "overlay" } },
      ...spans, ...extra,
    };
  }

  function stepTraces(step, timeline) {
    const rows = timeline.lanes.map((_, i) => i + 1);
    const chunked = chunkedGroups(timeline);
    const traces = Object.entries(KINDS).map(([kind, [title, fill, pattern]]) => {
      const mine = timeline.spans.filter((span) => span[KIND] === kind);
      return bars(title, {
        y: mine.map((span) => span[LANE] + 1), base: mine.map((span) => span[START]), x: mine.map((span) => span[LENGTH]),
        text: mine.map((span) => label(span, chunked)), hovertext: mine.map((span) => hover(step, timeline, span)), customdata: mine,
      }, fill(), pattern, { textfont: { color: readable(fill()), size: 11 } });
    }).filter((trace) => trace.x.length);
    const windows = timeline.groups.map((group) => group.window);
    traces.push(bars("groups", {
      y: windows.map(() => 0), base: windows.map((window) => window[0]), x: windows.map((window) => window[1] - window[0]),
      text: step.groups.map(groupName),
      hovertext: step.groups.map((group, i) =>
        `<b>${groupName(group)}</b><br>${count(group.tokens)} tokens, ${ms(windows[i][1] - windows[i][0])}`),
    }, style("--accent-soft"), "", { textfont: { color: style("--ink"), size: 11 } }));
    return { traces, rows };
  }

  // Ink for text on a filled bar: black or white, whichever stands out more.
  function readable(fill) {
    const hex = fill.startsWith("#") ? fill.match(/[0-9a-f]{2}/gi).map((part) => parseInt(part, 16)) : fill.match(/\d+/g);
    const [r, g, b] = hex.map((value) => (value / 255) ** 2.2);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.22 ? "#10141a" : "#ffffff";
  }

  // Swatches of the kinds of bars, with their patterns.
  const STRIPES = { "/": "135deg", "\\": "45deg", "|": "90deg", "-": "0deg", x: "45deg", ".": "90deg" };
  function legend(entries) {
    const swatch = (fill, pattern) => "display:inline-block;width:12px;height:12px;margin-right:5px;vertical-align:-1px;background:" +
      (pattern ? `repeating-linear-gradient(${STRIPES[pattern]},${fill} 0 3px,${style("--surface")} 3px 4px)` : fill);
    return el("div", { class: "row soft", style: "gap:2px 14px;margin:4px 0 0 84px;font-size:11px" },
      entries.map(([title, fill, pattern]) => el("span", {}, el("span", { style: swatch(fill, pattern) }), title)));
  }

  function drawStep(root, step, timeline, end, choose) {
    const { traces, rows } = stepTraces(step, timeline);
    const title = timeline.source === "predicted" ? "Predicted" : "Measured";
    const hidden = timeline.hidden_lanes ? `; ${timeline.hidden_lanes} more lanes are not shown` : "";
    const chart = el("div", { "data-timeline": timeline.source, style: "width:100%" });
    root.append(el("div", { class: "row", style: "margin:8px 0 0" },
      el("h2", { style: "margin:0" }, title),
      el("span", { class: "soft" }, `${ms(timeline.end_ms)} for the step${hidden}`)),
    legend(Object.entries(KINDS).filter(([kind]) => timeline.spans.some((span) => span[KIND] === kind))
      .map(([, [name, fill, pattern]]) => [name, fill(), pattern])), chart);
    plot(chart, traces, {
      barmode: "overlay", dragmode: "zoom", height: 30 + ROW * (rows.length + 1), margin: { l: 84, r: 12, t: 4, b: 26 },
      uniformtext: { minsize: 10, mode: "hide" }, hovermode: "closest", bargap: 0,
      xaxis: { range: [0, end * 1.005], ticksuffix: " ms", rangemode: "nonnegative", showgrid: true },
      yaxis: { autorange: "reversed", tickvals: [0, ...rows], ticktext: ["groups", ...timeline.lanes.map((lane) => lane.name)],
        fixedrange: true, showgrid: false, zeroline: false },
      showlegend: false,
    }, { displayModeBar: false });
    chart.on("plotly_click", (event) => {
      const span = event.points[0]?.customdata;
      if (span && sizes(step, timeline, span)) choose({ source: timeline.source, span });
    });
  }

  // -------------------------------------------------------------------------------------------- table of groups
  function groupTable(step) {
    const [predicted, measured] = ["predicted", "measured"].map((name) => step.timelines.find((one) => one.source === name));
    const shown = [predicted, measured].filter(Boolean);
    const columns = [{ title: "group" }, { title: "micro-batches", right: true }, { title: "tokens", right: true }];
    for (const part of ["switch", "run", "reduce"]) {
      for (const one of shown) columns.push({ title: shown.length > 1 ? `${part}, ${one.source}` : part, right: true });
      if (measured) columns.push({ title: "ratio", right: true });
    }
    const more = [["tokens/s", (times) => count(Math.round(times.tokens_per_s))]];
    if (shown.some((one) => one.groups.some((times) => times.bubble !== null))) {
      more.push(["bubble", (times) => (times.bubble === null ? "" : `${(100 * times.bubble).toFixed(1)}%`)]);
    }
    for (const [title] of more) {
      for (const one of shown) columns.push({ title: shown.length > 1 ? `${title}, ${one.source}` : title, right: true });
    }
    const ratio = (a, b) => (b > 0 ? `${(a / b).toFixed(2)}×` : "–");
    const cells = (times) => [...times.map((value) => ms(value)), ...(measured ? [ratio(times[1], times[0])] : [])];
    const rows = step.groups.map((group, i) => [
      groupName(group),
      String(Math.max(...group.replicas.map((replica) => replica.length))),
      count(group.tokens),
      ...["switch", "run", "reduce"].flatMap((part) => cells(shown.map((one) => one.groups[i][part]))),
      ...more.flatMap(([, text]) => shown.map((one) => text(one.groups[i]))),
    ]);
    const optimizer = shown.map((one) => one.optimizer);
    if (optimizer.some((value) => value > 0)) {
      const before = measured ? 3 : 1;
      rows.push(["optimizer", "", "", ...Array(before).fill(""), ...cells(optimizer), ...Array(before + more.length * shown.length).fill("")]);
    }
    const note = measured
      ? "Ratio: measured over predicted. Times are means over the ranks; a run includes waiting for others."
      : "Times are means over the ranks; bytes and tokens are those of all ranks. Tokens/s count a group's switch and reduction.";
    return el("div", { class: "card", style: "margin-top:12px;overflow-x:auto" }, el("h2", {}, "Groups"),
      table(columns, rows, { "data-groups": "", style: "white-space:nowrap" }), el("p", { class: "soft", style: "margin:8px 0 0" }, note));
  }

  // ------------------------------------------------------------------------------------- inside of a micro-batch
  // The span to look into: the one that was clicked, else the first micro-batch of the chosen strategy.
  function chosenSpan(step) {
    if (state.chosen) return state.chosen;
    const timeline = step.timelines[0];
    const mine = (span) => sizes(step, timeline, span) && step.groups[span[GROUP]].strategy === fxpar.strategy();
    const span = timeline.spans.find(mine) ?? timeline.spans.find((one) => sizes(step, timeline, one));
    return span ? { source: timeline.source, span } : null;
  }

  function insideRows(section, step, chosen) {
    const timeline = step.timelines.find((one) => one.source === chosen.source);
    const { span } = chosen;
    const size = sizes(step, timeline, span);
    const { strategy } = step.groups[span[GROUP]];
    const stage = section.inside[strategy].stages[Math.max(span[STAGE], 0)];
    let now = 0;
    const part = stage[PART[span[KIND]] ?? "body"];
    const rows = part.rows.map((row) => {
      const found = { module: row[MODULE], kind: row[WHAT], axis: row[AXIS], backward: Boolean(row[BACKWARD]),
        calls: row[CALLS], start: now, ms: at(row[MS], size), bytes: at(row[BYTES], size) };
      now += found.ms;
      return found;
    });
    const kernels = part.kernels.map(([kind, calls, term]) => [kind, calls, at(term, size)]);
    return { rows, kernels, size, strategy, total: now };
  }

  function insideTraces(rows) {
    const kinds = [...new Set(rows.map((row) => row.kind))];
    const text = (row) => `<b>${row.module || "(model)"}</b>   ${ms(row.ms)}<br>` +
      (row.kind === "compute" ? `${row.calls} kernels, ${bytes(row.bytes)} read and written`
        : `${words(row.kind)} over ${row.axis}, ${row.calls > 1 ? `${row.calls} calls, ` : ""}${bytes(row.bytes)} sent by a rank`) +
      `<br>${row.backward ? "backward" : "forward"}`;
    const traces = kinds.map((kind) => {
      const mine = rows.filter((row) => row.kind === kind);
      const fill = kind === "compute" ? mine.map((row) => mixed(row.backward ? 80 : 45)) : colour[kind];
      return bars(kind === "compute" ? "compute" : `${code(kind)} ${words(kind)}`, {
        y: mine.map(() => (kind === "compute" ? 1 : 2)), base: mine.map((row) => row.start), x: mine.map((row) => row.ms),
        text: mine.map((row) => (kind === "compute" ? short(row.module) : code(kind))), hovertext: mine.map(text),
      }, fill, "", { textfont: { color: [fill].flat().map(readable), size: 10 } });
    });
    const layers = merged(rows);
    traces.push(bars("modules", {
      y: layers.map(() => 0), base: layers.map((one) => one.start), x: layers.map((one) => one.ms),
      text: layers.map((one) => one.name), hovertext: layers.map((one) => `<b>${one.name}</b>   ${ms(one.ms)}`),
    }, style("--accent-soft"), "", { textfont: { color: style("--ink"), size: 10 } }));
    return traces;
  }

  function insideLegend(rows) {
    const both = [false, true].filter((backward) => rows.some((row) => row.kind === "compute" && row.backward === backward));
    const kinds = [...new Set(rows.map((row) => row.kind))].filter((kind) => kind !== "compute");
    return [...both.map((backward) => [`compute, ${backward ? "backward" : "forward"}`, mixed(backward ? 80 : 45), ""]),
      ...kinds.map((kind) => [`${code(kind)} ${words(kind)}`, colour[kind], ""])];
  }

  // Nothing for what a layer does itself: its number would read as that of a micro-batch.
  const short = (module) => module.split(".").at(-1).replace(/^\d+$/, "");
  // `layers.3` of `layers.3.attention`; outside of numbered layers the first name.
  const layerOf = (module) => module.match(/^(.*?\.)?\d+(?=\.|$)/)?.[0] ?? module.split(".")[0];
  const unnumbered = (module) => module.replace(/(^|\.)\d+(?=\.|$)/g, "$1*");

  function merged(rows) {
    const found = [];
    for (const row of rows) {
      const name = (layerOf(row.module) || "(model)") + (row.backward ? " backward" : "");
      const last = found.at(-1);
      if (last?.name === name) last.ms = row.start + row.ms - last.start;
      else found.push({ name, start: row.start, ms: row.ms });
    }
    return found;
  }

  function sums(rows, key) {
    const found = new Map();
    for (const row of rows) {
      const sum = found.get(key(row)) ?? { calls: 0, ms: 0, bytes: 0, compute: 0, sent: 0 };
      sum.calls += row.calls;
      sum.ms += row.ms;
      sum.bytes += row.bytes;
      if (row.kind === "compute") sum.compute += row.ms;
      else sum.sent += row.bytes;
      found.set(key(row), sum);
    }
    return [...found].sort((a, b) => b[1].ms - a[1].ms);
  }

  function breakdown({ rows, kernels, total }) {
    const share = (value) => (total > 0 ? `${((100 * value) / total).toFixed(1)}%` : "–");
    const sent = sums(rows.filter((row) => row.kind !== "compute"), (row) => `${row.kind}\u0000${row.axis}`);
    const kinds = [
      ...kernels.map(([kind, calls, time]) => [KERNELS[kind], count(calls), "", ms(time), share(time)]),
      ...sent.map(([key, sum]) => {
        const [kind, axis] = key.split("\u0000");
        return [fxpar.chip(kind, `${words(kind)} over ${axis}`), count(sum.calls), bytes(sum.bytes), ms(sum.ms), share(sum.ms)];
      }),
    ];
    const modules = sums(rows, (row) => unnumbered(row.module) || "(model)").slice(0, 14).map(([name, sum]) =>
      [el("code", {}, name), ms(sum.compute), ms(sum.ms - sum.compute), sum.sent ? bytes(sum.sent) : "", share(sum.ms)]);
    const right = (title) => ({ title, right: true });
    return el("div", { class: "row", style: "align-items:flex-start;gap:12px 48px;margin-top:8px" },
      table([{ title: "by kind" }, right("calls"), right("sent by a rank"), right("time"), right("share")], kinds, { "data-kinds": "" }),
      table([{ title: "by module, all layers together" }, right("compute"), right("collectives"), right("sent"), right("share")],
        modules, { "data-modules": "" }));
  }

  function drawInside(root, section, step) {
    root.replaceChildren();
    const chosen = chosenSpan(step);
    if (!chosen) return;
    const found = insideRows(section, step, chosen);
    const { span } = chosen;
    const what = span[KIND] === "micro_batch" ? `micro-batch ${span[MICRO]}`
      : `${words(PART[span[KIND]].replace("_part", ""))} of micro-batch ${span[MICRO]} on stage ${span[STAGE]}`;
    const chart = el("div", { style: "width:100%" });
    root.append(
      el("div", { class: "row" }, el("h2", { style: "margin:0" }, `Inside ${what} under ${found.strategy}, predicted`),
        el("span", { class: "soft" }, `${sizeText(step.groups[span[GROUP]], found.size)}, ` +
          `${ms(found.total)}; click another micro-batch above to look into it`)),
      legend(insideLegend(found.rows)), chart);
    if (!found.rows.length) return;
    const silent = found.rows.every((row) => row.kind === "compute");
    plot(chart, insideTraces(found.rows), {
      barmode: "overlay", dragmode: "zoom", height: silent ? 88 : 112, margin: { l: 84, r: 12, t: 4, b: 26 },
      uniformtext: { minsize: 9, mode: "hide" }, hovermode: "closest", bargap: 0,
      xaxis: { range: [0, found.total * 1.005], ticksuffix: " ms" },
      yaxis: { range: [silent ? 1.6 : 2.6, -0.6], tickvals: [0, 1, 2], ticktext: ["modules", "compute", "collectives"], fixedrange: true,
        showgrid: false, zeroline: false },
      showlegend: false,
    }, { displayModeBar: false });
    root.append(breakdown(found));
  }

  // ------------------------------------------------------------------------------------------------------ the tab
  function controls(section, step, again) {
    const select = section.steps.length > 1 && el("label", {}, "Step ", el("select", { id: "timeline-step",
      onchange: (event) => again({ step: Number(event.target.value), chosen: null }) },
      section.steps.map((one, i) => el("option", { value: i, selected: i === state.step }, one.title))));
    const scale = step.timelines.length > 1 && el("button", { type: "button", class: "quiet", id: "timeline-scale",
      "aria-pressed": String(state.sameScale), onclick: () => again({ sameScale: !state.sameScale }) },
      state.sameScale ? "A scale each" : "One scale for both");
    return el("div", { class: "row" }, select || el("span", {}, step.title), scale,
      el("span", { class: "soft" }, "drag to zoom, double-click to see all, shift and drag to move"));
  }

  // After another strategy was chosen: a step that runs it, where the shown one does not.
  function follow(section) {
    state.strategy = fxpar.strategy();
    state.chosen = null;
    const runs = (step) => step.groups.some((group) => group.strategy === state.strategy);
    if (!runs(section.steps[state.step])) state.step = Math.max(0, section.steps.findIndex(runs));
  }

  function render(root, section) {
    if (state.strategy !== fxpar.strategy()) follow(section);
    const step = section.steps[state.step];
    const again = (change) => {
      Object.assign(state, change);
      root.replaceChildren();
      render(root, section);
    };
    const end = Math.max(...step.timelines.map((one) => one.end_ms));
    const card = el("div", { class: "card" }, controls(section, step, again));
    const inside = el("div", { class: "card", id: "timeline-inside", style: "margin-top:12px" });
    const assumed = el("details", { class: "soft", style: "margin-top:12px" }, el("summary", {}, "What the predictions assume"),
      section.assumed.map((text) => el("p", { style: "margin:4px 0 0" }, text)));
    root.append(card, inside, groupTable(step), assumed);
    for (const timeline of step.timelines) {
      drawStep(card, step, timeline, state.sameScale ? end : timeline.end_ms, (chosen) => {
        state.chosen = chosen;
        drawInside(inside, section, step);
      });
    }
    drawInside(inside, section, step);
  }

  fxpar.register("timeline", "Timeline", render);
})();
