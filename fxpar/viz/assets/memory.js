"use strict";
// The memory tab: the peaks of all strategies, what a rank holds over time, and the tables of `fxpar memory`.
(() => {
  const { el, bytes, ms, count, table, plot } = fxpar;
  // part -> [colour in light, in dark, pattern]: what stays is grey, what a micro-batch makes is coloured; parts that
  // look alike differ by pattern.
  const LOOK = {
    "master weights": ["#aab3c0", "#4a5361", ""],
    "optimizer": ["#c3cad4", "#3b434f", "."],
    "weights": ["#8793a5", "#5f6b7c", ""],
    "gradients": ["#d6dbe2", "#2f3640", "x"],
    "accumulators": ["#b9a98f", "#6b5d45", ""],
    "saved activations": ["#2f6fd0", "#5b93ea", ""],
    "recomputed or fetched": ["#128a7c", "#3fbcae", "/"],
    "forward temporaries": ["#8fb8f0", "#2d5591", ""],
    "backward temporaries": ["#d98324", "#e39a4a", "\\"],
    "new gradients": ["#b8447f", "#e07cae", ""],
    "messages and batches": ["#7a55c9", "#a68bf0", "|"],
    "messages of a switch": ["#7a55c9", "#a68bf0", "/"],
    "workspace": ["#c9a400", "#d9bd3f", "."],
  };
  const state = { position: 0, all: true };

  const shade = (part) => LOOK[part][fxpar.theme() === "dark" ? 1 : 0];
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const pattern = (part) => ({ shape: LOOK[part][2], size: 6, solidity: 0.25, fgcolor: style("--surface"), fillmode: "overlay" });
  const sum = (numbers) => numbers.reduce((total, one) => total + one, 0);
  const plain = (text) => text.replaceAll("<", "‹").replaceAll(">", "›"); // plotly reads tags in its texts
  const ranksText = ([first, last]) => (first === last ? `rank ${first}` : `ranks ${first}–${last}`);

  // ---------------------------------------------------------------------------------------------- all strategies
  function peaks(section, root) {
    const names = fxpar.data.strategies.filter((name) => section.by_strategy[name]);
    const parts = Object.keys(LOOK).filter((part) => names.some((name) => section.by_strategy[name].peak[part]));
    const chart = el("div", { "data-peaks": names.length, style: `height:${100 + 34 * names.length}px` });
    root.append(el("div", { class: "card" },
      el("h2", {}, "Peak of the fullest rank"),
      el("p", { class: "soft", style: "margin:0 0 4px" }, "Click a bar to see what its strategy holds over time."), chart));
    const traces = parts.map((part) => ({
      type: "bar", orientation: "h", name: part, y: names, x: names.map((name) => section.by_strategy[name].peak[part] ?? 0),
      marker: { color: shade(part), pattern: pattern(part) },
      text: names.map((name) => bytes(section.by_strategy[name].peak[part] ?? 0)), textposition: "none",
      hovertemplate: "%{y}<br>%{fullData.name}: %{text}<extra></extra>",
    }));
    const totals = names.map((name) => ({
      x: section.by_strategy[name].peak_bytes, y: name, xanchor: "left", showarrow: false, xshift: 4,
      text: bytes(section.by_strategy[name].peak_bytes) + (section.by_strategy[name].peak_at === "a switch" ? ", in a switch" : "") + (name === fxpar.strategy() ? "  ◂ below" : "") }));
    const most = Math.max(...names.map((name) => section.by_strategy[name].peak_bytes));
    plot(chart, traces, {
      barmode: "stack", bargap: 0.35, annotations: totals, margin: { l: 20, r: 12, t: 10, b: 26 },
      xaxis: { tickformat: "~s", ticksuffix: "B", range: [0, most * 1.3] },
      yaxis: { autorange: "reversed", type: "category", tickfont: { family: style("--mono") } },
      legend: { orientation: "h", y: -28 / (34 * names.length), yanchor: "top", x: 0, traceorder: "normal" },
    }, { displayModeBar: false });
    chart.on("plotly_click", (event) => fxpar.choose(event.points[0].y));
  }

  // ------------------------------------------------------------------------------------------------ one over time
  function overTime(view, root) {
    const position = Math.min(state.position, view.ranks.length - 1);
    const rank = view.ranks[position];
    const chart = el("div", { "data-memory": position, style: "height:430px" });
    const what = view.schedule
      ? `${view.schedule}, every pipeline rank by its schedule`
      : view.micro_batches > 1
        ? `a micro-batch behind the first of ${view.micro_batches}: gradients add up`
        : "one micro-batch";
    const asked = (name, size) => (view.asked[name] === size ? "" : ` (${count(view.asked[name])} and padding)`);
    const sizes = Object.entries(view.sizes).map(([name, size]) => `${name} = ${count(size)}${asked(name, size)}`).join(", ");
    const shown = rank.x.length < rank.moments ? `; ${count(rank.x.length)} of ${count(rank.moments)} moments are drawn, all peaks among them` : "";
    root.append(el("div", { class: "card", style: "margin-top:12px" },
      el("div", { class: "row", style: "margin-bottom:4px" },
        el("h2", { style: "margin:0" }, `${ranksText(rank.ranks)} over time`),
        el("span", { class: "soft" }, `${what}${sizes ? `, ${sizes}` : ""}${shown}`),
        el("span", { style: "flex:1" }),
        view.ranks.length > 1 ? pills("Ranks", view.ranks.map((one, i) => [ranksText(one.ranks), i]), position, (i) => { state.position = i; }) : null,
        pills("Parts", [["everything", true], ["what a micro-batch adds", false]], state.all, (all) => { state.all = all; })),
      chart));
    draw(chart, rank);
  }

  function pills(label, choices, chosen, choose) {
    return el("div", { class: "pills", role: "radiogroup", "aria-label": label }, choices.map(([text, value]) =>
      el("button", { type: "button", role: "radio", "aria-checked": String(value === chosen), "data-choice": text, onclick: () => {
        choose(value);
        again();
      } }, text)));
  }

  function draw(chart, rank) {
    const parts = Object.entries(rank.series);
    const level = state.all ? sum(Object.values(rank.level)) : 0;
    const totals = rank.x.map((_, i) => level + sum(parts.map(([, sizes]) => sizes[i])));
    const stays = Object.entries(rank.level).filter(([, size]) => size).map(([part, size]) => [part, rank.x.map(() => size)]);
    const area = ([part, sizes]) => ({
      type: "scatter", mode: "lines", stackgroup: "held", name: part, x: rank.x, y: sizes, hoverinfo: "skip",
      line: { width: 0, shape: "hv" }, fillcolor: shade(part),
      fillpattern: { shape: LOOK[part][2], size: 6, solidity: 0.25, fgcolor: style("--surface"), fillmode: "overlay" } });
    const peak = totals.indexOf(Math.max(...totals));
    const outline = {
      type: "scatter", mode: "lines", name: "total", x: rank.x, y: totals, showlegend: false,
      line: { width: 1, shape: "hv", color: style("--ink") }, text: rank.x.map((_, i) => hover(rank, parts, totals, i)),
      hovertemplate: "%{text}<extra></extra>" };
    const [node, module, , during] = words(rank, peak);
    const where = [node ? `%${node}` : "", module ? `in ${module}` : "", during ? `(${during})` : ""].filter(Boolean).join(" ");
    plot(chart, [...(state.all ? stays : []), ...parts].map(area).concat(outline), {
      hovermode: "x", hoverdistance: -1, margin: { l: 20, r: 16, t: 12, b: 36 }, shapes: marks(rank),
      xaxis: { title: { text: "predicted ms" }, range: [0, Math.max(rank.end_ms, rank.x.at(-1)) || 1], showspikes: true, spikemode: "across",
        spikethickness: 1, spikedash: "solid", spikecolor: style("--soft") },
      yaxis: { tickformat: "~s", ticksuffix: "B", rangemode: "tozero", range: [0, totals[peak] * 1.18] },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, traceorder: "normal" },
      annotations: [...notes(rank), {
        x: rank.x[peak], y: totals[peak], ax: rank.x[peak] > rank.end_ms / 2 ? -50 : 50, ay: -24, arrowcolor: style("--ink"),
        xanchor: rank.x[peak] > rank.end_ms / 2 ? "right" : "left", bgcolor: style("--raised"), bordercolor: style("--line-strong"),
        borderpad: 3, text: `<b>peak ${bytes(totals[peak])}</b> at ${plain(where)}` }],
    }, { displayModeBar: false });
  }

  // [node, module, op, action] of a moment.
  const words = (rank, i) => rank.at[i].map((place) => rank.names[place]);

  function hover(rank, parts, totals, i) {
    const [node, module, op, during] = words(rank, i).map(plain);
    const lines = [`<b>${bytes(totals[i])}</b>   ${ms(rank.x[i])}`];
    if (node) lines.push(`%${node}${op && op !== node ? `  (${op})` : ""}`);
    lines.push([module, during].filter(Boolean).join(", "));
    const sizes = parts.map(([part, all]) => [part, all[i]]).filter(([, size]) => size);
    for (const [part, size] of sizes.sort((a, b) => b[1] - a[1])) lines.push(`${bytes(size)}  ${part}`);
    return lines.filter(Boolean).join("<br>");
  }

  // [action, begin, end] of a pipeline rank's moments.
  function actions(rank) {
    const found = [];
    rank.x.forEach((x, i) => {
      const during = words(rank, i)[3];
      if (!during.includes("@")) return;
      if (found.at(-1)?.[0] === during) found.at(-1)[2] = x;
      else found.push([during, x, x]);
    });
    found.forEach((one, i) => { one[2] = Math.max(one[2], Math.min(found[i + 1]?.[1] ?? rank.end_ms, one[2] * 1.02 + 1e-9)); });
    return found;
  }

  function marks(rank) {
    const line = (x) => ({ type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, layer: "above",
      line: { color: style("--ink"), width: 1, dash: "dot" } });
    if (rank.backward_ms !== null) return [line(rank.backward_ms)];
    return actions(rank).filter(([name]) => name.startsWith("F")).map(([, from, to]) => ({ type: "rect", x0: from, x1: to, yref: "paper",
      y0: 0, y1: 1, layer: "below", line: { width: 0 }, fillcolor: style("--accent-soft") }));
  }

  function notes(rank) {
    const text = (words, x) => ({ x, yref: "paper", y: 1, yanchor: "top", xanchor: "left", showarrow: false, text: words,
      font: { size: 11, color: style("--soft") } });
    if (rank.backward_ms !== null) return [text("backward", rank.backward_ms)];
    const found = actions(rank);
    const several = new Set(found.map(([name]) => name.split("@")[1])).size > 1;
    return found.length > 48 ? [] : found.map(([name, from]) => text(several ? name : name.split("@")[0], from));
  }

  // ------------------------------------------------------------------------------------------------------ tables
  function tables(view, root) {
    const last = view.table.length - 1;
    const rows = view.table.map(([what, size, why], i) => {
      const bold = (content) => (i === last ? el("b", {}, content) : content);
      return [bold(what), bold(bytes(size)), el("span", { class: "soft" }, why)];
    });
    const row = el("div", { class: "row", style: "align-items:flex-start;margin-top:12px;gap:12px" },
      el("div", { class: "card", "data-table": "rank" },
        el("h2", {}, view.stages.length ? "The fullest rank" : "Per rank"),
        table([{ title: "" }, { title: "bytes", right: true }, { title: "" }], rows)));
    if (view.stages.length) row.append(stages(view));
    root.append(row);
  }

  function stages(view) {
    const titles = ["stage", "ranks", "from", "weights", "accumulators", "saved", "messages", "peak", "rank"];
    const rows = view.stages.map((stage) => [
      String(stage.stage), stage.ranks[0] === stage.ranks[1] ? String(stage.ranks[0]) : stage.ranks.join("–"), stage.begins || "the start",
      bytes(stage.weight_bytes), bytes(stage.gradient_bytes), `${stage.in_flight} × ${bytes(stage.saved_bytes)}`,
      bytes(stage.received_bytes + stage.sent_bytes), bytes(stage.peak.total_bytes), bytes(stage.rank_peak_bytes)]);
    return el("div", { class: "card", "data-table": "stages", style: "overflow-x:auto" },
      el("h2", {}, "Stages, each on one of its ranks, and all that the rank holds"),
      table(titles.map((title, i) => ({ title, right: i > 2 })), rows));
  }

  let again = () => {};
  function render(root, section, view) {
    again = () => {
      const focused = root.contains(document.activeElement) ? document.activeElement.dataset.choice : undefined;
      root.replaceChildren();
      if (fxpar.data.strategies.length > 1) peaks(section, root);
      overTime(view, root);
      tables(view, root);
      if (focused) [...root.querySelectorAll("[data-choice]")].find((node) => node.dataset.choice === focused)?.focus();
    };
    again();
  }

  fxpar.register("memory", "Memory", render);
})();
