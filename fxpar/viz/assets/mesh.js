"use strict";
// The mesh tab: which rank holds what of a parameter, and what a switch moves between ranks and nodes.
(() => {
  const { el, bytes, ms, count, table, plot, placed, tip } = fxpar;
  const PICTURE = 230; // px of a tensor's longer side
  const MANY = 32; // ranks or pieces: drawn smaller, without lines between
  const state = { kind: null, from: null, rank: null, scope: "kind", by: "ranks", filter: "" };
  let again = () => {};

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // 0 -> A, 25 -> Z, 26 -> AA
  function letter(number) {
    return (number >= 26 ? letter(Math.floor(number / 26) - 1) : "") + String.fromCharCode(65 + (number % 26));
  }

  // A name that may be broken behind dots only.
  const broken = (text) => text.replaceAll("-", "\u2011").split(/(?<=\.)/).flatMap((word) => [word, el("wbr")]);

  // Hues far from each other for neighbours; the letter tells pieces of one colour apart.
  function shade(number, of) {
    const hue = of <= 8 ? (205 + (360 / Math.max(of, 2)) * number) % 360 : (205 + 137.5 * number) % 360;
    return fxpar.theme() === "dark" ? `hsl(${hue} 38% 33%)` : `hsl(${hue} 62% 81%)`;
  }

  // --------------------------------------------------------------------------------------------- list of parameters
  function list(section, root) {
    const items = el("ul", { "aria-label": "Parameters" });
    const fill = () => {
      const wanted = state.filter.trim().toLowerCase();
      const matches = (kind) => [kind.title, kind.pattern, ...kind.members].some((text) => text.toLowerCase().includes(wanted));
      const found = section.kinds.map((kind, i) => [kind, i]).filter(([kind]) => !wanted || matches(kind));
      items.replaceChildren(...found.map(([kind, i]) => el("li", {}, el("button", {
        type: "button", "data-kind-number": i, "aria-pressed": String(i === state.kind), title: kind.title,
        onclick: () => { state.kind = i; state.rank = null; again(); },
      }, el("span", {}, broken(kind.title)), el("span", {}, kind.members.length > 1 ? `× ${kind.members.length}` : "")))));
      if (!found.length) items.append(el("li", { class: "soft" }, "No parameter has this in its name."));
    };
    const box = el("input", { type: "search", id: "mesh-filter", placeholder: "Filter, such as layers.7 or q_proj",
      "aria-label": "Filter parameters", oninput: (event) => { state.filter = event.target.value; fill(); } });
    box.value = state.filter;
    fill();
    root.append(el("div", { class: "card mesh-list" }, box, items));
    return items;
  }

  // -------------------------------------------------------------------------------------------------- one layout
  // A tensor of `kind` to scale (at most 4 : 1): {svg, box(flat box) -> rectangle or null}.
  function canvas(kind, label) {
    const size = (d) => (d === undefined ? 1 : kind.shape[d]);
    const [down, across] = kind.drawn.length > 1 ? kind.drawn : [undefined, kind.drawn[0]];
    const ratio = kind.drawn.length > 1 ? Math.min(4, Math.max(0.25, size(across) / size(down))) : 7;
    const [width, height] = ratio >= 1 ? [PICTURE, PICTURE / ratio] : [PICTURE * ratio, PICTURE];
    const left = kind.drawn.length > 1 ? 22 : 1;
    const svg = el("svg:svg", { viewBox: `0 0 ${width + left + 2} ${height + 20}`, width: width + left + 2, height: height + 20, role: "img",
      "aria-label": label });
    const side = (text, x, y, turn) => el("svg:text", { class: "side", x, y, transform: turn ? `rotate(-90 ${x} ${y})` : null }, text);
    const dims = kind.shape.length > 2 ? (d) => `dim ${d}: ${count(size(d))}` : (d) => count(size(d));
    if (across !== undefined) svg.append(side(dims(across), left + width / 2, 8));
    if (down !== undefined) svg.append(side(dims(down), 9, 18 + height / 2, true));
    svg.append(el("svg:rect", { class: "empty", x: left, y: 18, width, height }));
    const span = (box, d, length) => (d === undefined ? [0, length]
      : [(box[2 * d] / size(d)) * length, (box[2 * d + 1] / size(d)) * length]);
    const place = (box) => {
      const [[x0, x1], [y0, y1]] = [span(box, across, width), span(box, down, height)];
      return { x: left + x0, y: 18 + y0, width: Math.max(x1 - x0, 0.5), height: Math.max(y1 - y0, 0.5) };
    };
    return { svg, place, finish: () => svg.append(el("svg:rect", { class: "outline", x: left, y: 18, width, height })) };
  }

  const area = ({ width, height }) => width * height;
  const center = (text, at) => el("svg:text", { x: at.x + at.width / 2, y: at.y + at.height / 2 }, text);
  const fits = (text, at) => at.width > 7 * text.length + 3 && at.height > 12;

  function boxText(box) {
    const sides = [];
    for (let d = 0; d < box.length; d += 2) sides.push(`${count(box[d])}:${count(box[d + 1])}`);
    return `[${sides.join(", ")}]`;
  }

  function tensor(kind, placement, mark) {
    const picture = canvas(kind, `How ${kind.title} is cut: ${placement.text.join("; ")}`);
    placement.pieces.forEach((boxes, piece) => {
      const places = boxes.map(picture.place);
      places.forEach((at, i) => {
        const node = el("svg:rect", { class: placement.pieces.length > MANY ? "piece thin" : "piece", "data-piece": piece, fill: shade(piece, placement.pieces.length), ...at,
          onmouseenter: () => mark(piece), onmouseleave: () => mark(null) });
        picture.svg.append(tip(node, () => `${letter(piece)} ${boxText(boxes[i])}\n${holders(placement, piece)}`));
      });
      const widest = places.reduce((a, b) => (area(b) > area(a) ? b : a));
      if (fits(letter(piece), widest)) picture.svg.append(center(letter(piece), widest));
    });
    picture.finish();
    return picture.svg;
  }

  function holders(placement, piece) {
    const ranks = placement.of_rank.flatMap((held, rank) => (held === piece ? [rank] : []));
    return `${bytes(placement.bytes[piece])} on ${ranks.length === 1 ? "rank" : "ranks"} ${ranges(ranks)}`;
  }

  // [0, 1, 2, 5] -> "0–2, 5"
  function ranges(numbers) {
    const runs = [];
    for (const number of numbers) {
      if (runs.at(-1)?.[1] === number - 1) runs.at(-1)[1] = number;
      else runs.push([number, number]);
    }
    return runs.map(([first, last]) => (first === last ? String(first) : `${first}–${last}`)).join(", ");
  }

  function ranks(section, layout, placement, mark, chosen) {
    const local = section.cluster.devices_per_node;
    const nodes = Array.from({ length: Math.ceil(layout.world / local) }, (_, node) => {
      const cells = [];
      for (let rank = node * local; rank < Math.min((node + 1) * local, layout.world); rank++) cells.push(cell(rank));
      return el("div", { class: "mesh-node", "data-node": node }, `node ${node}`,
        el("div", { class: "mesh-ranks", style: `--columns:${Math.min(cells.length, layout.world > MANY ? 8 : 4)}` }, cells));
    });
    function cell(rank) {
      const piece = placement.of_rank[rank];
      const node = el("button", { type: "button", class: piece < 0 ? "mesh-rank none" : "mesh-rank", "data-rank": rank, "data-piece": piece,
        style: piece < 0 ? null : `--fill:${shade(piece, placement.pieces.length)}`,
        "aria-pressed": chosen ? String(rank === state.rank) : null, "aria-label": `rank ${rank}: ${piece < 0 ? "nothing" : `piece ${letter(piece)}`}`,
        onmouseenter: () => mark(piece), onmouseleave: () => mark(null), onclick: chosen ? () => { state.rank = rank; again(); } : null },
      piece < 0 ? "–" : letter(piece), el("small", {}, rank));
      return tip(node, () => [`rank ${rank}`, layout.coordinates[rank], piece < 0 ? "holds nothing of it" : `${letter(piece)}: ${bytes(placement.bytes[piece])}`,
        ...(piece < 0 ? [] : placement.pieces[piece].slice(0, 8).map(boxText))].filter(Boolean).join("\n"));
    }
    return el("div", { class: layout.world > MANY ? "mesh-nodes many" : "mesh-nodes" }, nodes);
  }

  function layoutCard(section, title, layout, chosen) {
    const kind = section.kinds[state.kind];
    const placement = section.placements[layout.placed[state.kind]];
    const card = el("div", { class: "card mesh-layout", "data-layout": title });
    const mark = (piece) => {
      for (const node of card.querySelectorAll("[data-piece]")) node.classList.toggle("near", piece !== null && piece >= 0 && node.dataset.piece === String(piece));
    };
    const copies = placement.of_rank.filter((piece) => piece >= 0).length;
    const pieces = placement.pieces.length;
    const held = pieces === 1 ? `whole on ${copies} of ${layout.world} ranks` : `${pieces} pieces, ${copies === pieces ? "each on one rank" : `${copies / pieces} copies`}`;
    card.append(
      el("h2", { style: "margin-bottom:2px" }, title === "home" ? "home, what the optimizer sees" : el("span", { class: "mono" }, title)),
      el("div", {}, placement.text.map((text) => placed(text)), el("span", { class: "soft" }, `  ${held}`)),
      el("div", { class: "mesh-picture" }, tensor(kind, placement, mark), ranks(section, layout, placement, mark, chosen)));
    return card;
  }

  // ------------------------------------------------------------------------------------------------------ a switch
  function numbers(flow) {
    const sent = (kind) => `${bytes(flow[`sent_${kind}_bytes`])} (without relays at least ${bytes(flow[`bound_${kind}_bytes`])})`;
    const rows = [
      ["planner", flow.planner === flow.chosen ? flow.planner : `${flow.planner}: ${flow.chosen}`],
      ["inside nodes", bytes(flow.inside_bytes)],
      ["between nodes", bytes(flow.between_bytes)],
      ["stays where it is", bytes(flow.local_bytes)],
      ["fullest link inside", sent("inside")],
      ["fullest link between", sent("between")],
      ["messages", `${count(flow.transfers)} slices in ${flow.steps} step${flow.steps === 1 ? "" : "s"}`],
      ["predicted", `${ms(flow.predicted_ms)} (without relays at least ${ms(flow.bound_ms)})`],
    ];
    return table([{ title: "all parameters" }, { title: "" }], rows, { "data-switch": `${flow.from} -> ${flow.to}` });
  }

  function matrixCard(section, flow) {
    const scope = state.scope === "kind" ? flow.kinds[state.kind] : flow;
    const by = flow.ranks === null ? "nodes" : state.by;
    const chart = el("div", { "data-matrix": by, style: "width:100%;height:470px" });
    const kind = section.kinds[state.kind];
    const what = kind.members.length > 1 ? `this, × ${kind.members.length}` : "this parameter";
    const total = scope.inside_bytes + scope.between_bytes;
    const card = el("div", { class: "card" },
      el("div", { class: "row" }, el("h2", { style: "margin:0" }, "What moves"),
        pills("Parameters", [[what, "kind"], ["all parameters", "all"]], state.scope, (value) => { state.scope = value; }),
        flow.ranks === null ? el("span", { class: "soft" }, "by node: there are too many ranks")
          : pills("Between", [["ranks", "ranks"], ["nodes", "nodes"]], by, (value) => { state.by = value; })),
      el("p", { class: "soft", style: "margin:6px 0 0", "data-moved": total }, total
        ? `${bytes(scope.inside_bytes)} inside nodes, ${bytes(scope.between_bytes)} between; ${bytes(scope.local_bytes)} stay.`
        : `Nothing moves: all ${bytes(scope.local_bytes)} are where they are needed.`), chart);
    if (total) heat(section, chart, scope[by], by, flow);
    else chart.remove();
    return card;
  }

  function heat(section, chart, cells, by, flow) {
    const local = section.cluster.devices_per_node;
    const world = Math.max(section.home.world, section.by_strategy[flow.to].world);
    const size = by === "nodes" ? Math.ceil(world / local) : world;
    const z = Array.from({ length: size }, () => Array(size).fill(null));
    for (const [from, to, moved] of cells) z[from][to] = moved;
    const word = by === "nodes" ? "node" : "rank";
    const text = z.map((row) => row.map((moved) => (moved === null ? "" : bytes(moved))));
    const lines = [];
    for (let at = local; by === "ranks" && at < size; at += local) {
      const line = { type: "line", line: { color: style("--line-strong"), width: 1 } };
      lines.push({ ...line, x0: at - 0.5, x1: at - 0.5, y0: -0.5, y1: size - 0.5 }, { ...line, y0: at - 0.5, y1: at - 0.5, x0: -0.5, x1: size - 0.5 });
    }
    const axis = { dtick: size > 16 ? local : 1, range: [-0.5, size - 0.5], constrain: "domain", showgrid: false, zeroline: false };
    plot(chart, [{
      type: "heatmap", z, text, xgap: 1, ygap: 1, texttemplate: size <= 8 ? "%{text}" : "", textfont: { size: 10 },
      colorscale: [[0, style("--accent-soft")], [1, style("--accent")]], zmin: 0, zmax: Math.max(...cells.map((cell) => cell[2])),
      hoverongaps: false, showscale: size > 8,
      hovertemplate: `${word} %{y} → ${word} %{x}: %{text}<extra></extra>`,
      colorbar: { thickness: 10, tickformat: "~s", ticksuffix: "B", outlinewidth: 0 },
    }], {
      shapes: lines, margin: { l: 40, r: 8, t: 34, b: 8 },
      xaxis: { ...axis, side: "top", title: { text: `to ${word}`, standoff: 4 } },
      yaxis: { ...axis, autorange: false, range: [size - 0.5, -0.5], scaleanchor: "x", title: { text: `from ${word}` } },
    }, { displayModeBar: false });
  }

  function pills(label, choices, chosen, choose) {
    return el("div", { class: "pills", role: "radiogroup", "aria-label": label }, choices.map(([text, value]) =>
      el("button", { type: "button", role: "radio", "aria-checked": String(value === chosen), "data-choice": value,
        onclick: () => { choose(value); again(); } }, text)));
  }

  // What one rank's new piece is put together from.
  function arrivals(section, view, flow) {
    const kind = section.kinds[state.kind];
    const moves = flow.kinds[state.kind];
    const card = el("div", { class: "card", "data-arrivals": state.rank },
      el("h2", {}, `What rank ${state.rank} gets`, kind.members.length > 1 ? el("span", { class: "soft" }, ` of ${kind.members[0]}`) : null));
    if (moves.moves === null) {
      card.append(el("p", { class: "soft" }, "Too many slices to draw: the matrix has the sums."));
      return card;
    }
    const placement = section.placements[view.placed[state.kind]];
    const piece = placement.of_rank[state.rank];
    if (piece === undefined || piece < 0) {
      card.append(el("p", { class: "soft" }, "It needs nothing of this parameter. Choose another rank above."));
      return card;
    }
    const mine = moves.moves.filter((move) => move[2] === state.rank);
    const had = moves.had[state.rank] ?? [];
    card.append(el("div", { class: "mesh-picture" }, arrivalPicture(section, kind, moves, mine, had), sources(section, kind, moves, mine, had)));
    return card;
  }

  function arrivalPicture(section, kind, moves, mine, had) {
    const picture = canvas(kind, `What rank ${state.rank} gets of ${kind.title}`);
    const hatch = el("svg:pattern", { id: "mesh-had", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      el("svg:rect", { width: 6, height: 6, fill: style("--surface") }), el("svg:rect", { width: 2, height: 6, fill: style("--line-strong") }));
    picture.svg.append(el("svg:defs", {}, hatch));
    const draw = (slice, attributes, text, note) => {
      const at = picture.place(moves.slices[slice]);
      picture.svg.append(tip(el("svg:rect", { ...attributes, ...at }), `${note}\n${boxText(moves.slices[slice])}`));
      if (fits(text, at)) picture.svg.append(center(text, at));
    };
    for (const slice of had) draw(slice, { class: "had" }, "had", "already there");
    for (const [slice, from, , step] of mine) {
      draw(slice, { class: "piece", "data-from": from, fill: shade(from, section.home.world) }, `${from}`, `from rank ${from}${step ? `, in step ${step + 1}` : ""}`);
    }
    picture.finish();
    return picture.svg;
  }

  function sources(section, kind, moves, mine, had) {
    const itemsize = kind.bytes / Math.max(1, kind.shape.reduce((a, b) => a * b, 1));
    const size = (slice) => {
      let elements = 1;
      for (let i = 0; i < moves.slices[slice].length; i += 2) elements *= moves.slices[slice][i + 1] - moves.slices[slice][i];
      return elements * itemsize;
    };
    const node = (rank) => Math.floor(rank / section.cluster.devices_per_node);
    const sums = new Map();
    for (const [slice, from] of mine) sums.set(from, (sums.get(from) ?? 0) + size(slice));
    const rows = [...sums].sort((a, b) => b[1] - a[1] || a[0] - b[0]).map(([from, moved]) => [
      el("span", { class: "row", style: "gap:6px" },
        el("span", { style: `width:10px;height:10px;border-radius:2px;background:${shade(from, section.home.world)}` }), `rank ${from}`),
      bytes(moved), node(from) === node(state.rank) ? "same node" : `node ${node(from)}`]);
    if (had.length) rows.unshift(["had already", bytes(had.reduce((total, slice) => total + size(slice), 0)), ""]);
    const most = 12;
    const shown = rows.slice(0, most);
    if (rows.length > most) shown.push([`and ${rows.length - most} more`, "", ""]);
    return table([{ title: "from" }, { title: "bytes", right: true }, { title: "" }], shown, { "data-sources": rows.length });
  }

  // ------------------------------------------------------------------------------------------------------ the tab
  function head(section, view) {
    const kind = section.kinds[state.kind];
    const notes = [];
    if (kind.shape.length > 2) notes.push(`Drawn are dims ${kind.drawn.join(" and ")} of ${kind.shape.length}${kind.cut > 2 ? "; more than two are cut" : ""}.`);
    if (!kind.shape.length) notes.push("A scalar.");
    const choices = view.switches.map((flow) => el("option", { value: flow.from }, flow.from));
    const select = choices.length ? el("select", { id: "mesh-from", onchange: (event) => { state.from = event.target.value; again(); } }, choices) : null;
    if (select) select.value = state.from;
    return el("div", { class: "row card" },
      el("b", { class: "mono", id: "mesh-title" }, kind.title),
      el("span", { class: "soft" }, `${kind.dtype} [${kind.shape.map(count).join(", ")}], ${bytes(kind.bytes)}${kind.members.length > 1 ? ` each, ${kind.members.length} of them` : ""}. ${notes.join(" ")}`),
      el("span", { style: "flex:1" }),
      select ? [el("label", { for: "mesh-from" }, "weights come from"), select] : null);
  }

  function firstRank(section, view, flow) {
    const placement = section.placements[view.placed[state.kind]];
    const getting = flow.kinds[state.kind].moves?.[0]?.[2];
    return getting ?? Math.max(0, placement.of_rank.findIndex((piece) => piece >= 0));
  }

  // Which modules use which ranks for what.
  function roles(found) {
    const cell = (role) => el("span", { class: `mesh-role ${role.split("+")[0]}`, "data-role": role }, role);
    const rows = found.modules.map(([modules, number, uses, zero, saves]) => [
      el("span", { class: "mono" }, broken(modules || "all modules")), number > 1 ? `× ${number}` : "",
      ...uses.map(cell), zero ? `ZeRO-${zero}` : "", saves]);
    const columns = [{ title: "modules" }, { title: "" }, ...found.atoms.map((atom) => ({ title: atom })), { title: "" }, { title: "" }];
    const title = `What modules use the ranks for${found.stage ? `, ${found.stage}` : ""}`;
    return el("div", { class: "card", "data-roles": found.modules.length }, el("h2", {}, title),
      table(columns, rows, {}));
  }

  function main(section, view, root) {
    const strategy = fxpar.strategy();
    const flow = view.switches.find((one) => one.from === state.from) ?? view.switches[0];
    if (flow) state.from = flow.from;
    if (flow && (state.rank === null || state.rank >= view.world)) state.rank = firstRank(section, view, flow);
    const other = flow ? flow.from.split(" and ")[0] : "home";
    const before = section.by_strategy[other] ?? section.home;
    root.append(head(section, view), el("div", { class: "mesh-pair" },
      layoutCard(section, section.by_strategy[other] ? other : "home", before, false),
      layoutCard(section, strategy, view, Boolean(flow))));
    root.append(...view.roles.map(roles));
    if (!flow) return;
    root.append(el("div", { class: "mesh-flow" },
      el("div", { class: "mesh-main" }, el("div", { class: "card" }, el("h2", {}, `Switch from ${flow.from} to ${flow.to}`), numbers(flow)),
        arrivals(section, view, flow)),
      matrixCard(section, flow)));
  }

  function render(root, section, view) {
    const grid = el("div", { class: "mesh" });
    root.append(grid);
    // The first kind that some layout cuts in two dims or more pieces says most.
    if (state.kind === null) state.kind = Math.max(0, section.kinds.findIndex((kind) => kind.cut > 0 && kind.members.length > 1 && kind.shape.length > 1));
    again = () => {
      fxpar.hideTip();
      const top = grid.querySelector("ul")?.scrollTop ?? 0;
      const focused = grid.contains(document.activeElement) ? document.activeElement : null;
      const attribute = ["data-rank", "data-kind-number", "data-choice"].find((name) => focused?.hasAttribute(name));
      const selector = attribute && `[${attribute}="${focused.getAttribute(attribute)}"]`;
      const right = el("div", { class: "mesh-main" });
      grid.replaceChildren();
      const items = list(section, grid);
      grid.append(right);
      main(section, view, right);
      items.scrollTop = top;
      if (selector) [...grid.querySelectorAll(selector)].at(-1)?.focus();
    };
    again();
  }

  fxpar.register("mesh", "Mesh", render);
})();
