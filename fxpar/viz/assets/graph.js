"use strict";
// The graph tab: boxes that unfold in place, edges between them, a search and a side panel.
(() => {
  const { el, pressable, bytes, ms, flops, count, chip, axes, placed, tip, graph } = fxpar;
  const STACK = 6; // so many repeated blocks are unfolded at first
  const MOST_HITS = 60;

  // What stays when the strategy or the theme changes.
  const kept = { direction: "forward", stage: 0, open: new Set(), touched: false, selected: "", zoom: 1 };
  let shown = null; // {strategy, part, root, canvas, frame, side}

  function render(root, section, view) {
    const strategy = graph.strategyData(section, view);
    const part = choosePart(strategy);
    shown = { strategy, part, section };
    shown.canvas = el("div", { class: "canvas" });
    shown.frame = el("div", { class: "frame", id: "graph-frame" }, el("div", { class: "zoomed" }, shown.canvas));
    shown.side = el("aside", { class: "card side", id: "graph-side", "aria-label": "Details" });
    root.append(el("div", { class: "row tools" }, partRow(strategy, part), searchBox(), zoomRow()),
      el("div", { class: "graph" }, shown.frame, shown.side));
    drawPart();
  }

  const direction = (part) => part.id.split(".").at(-1);

  function choosePart(strategy) {
    const stages = strategy.parts.map((part) => part.stage ?? 0);
    const stage = stages.includes(kept.stage) ? kept.stage : 0;
    const here = strategy.parts.filter((part) => (part.stage ?? 0) === stage);
    return here.find((part) => direction(part) === kept.direction) ?? here.find((part) => direction(part) === "forward") ?? here[0];
  }

  function drawPart() {
    const { part, canvas } = shown;
    if (!kept.touched) openFirst(part, part.root);
    canvas.replaceChildren();
    shown.root = part.root;
    shown.root.element = canvas;
    fill(shown.root);
    arrange(shown.root);
    zoomTo(kept.zoom);
    const { frame } = shown;
    frame.scrollTo((frame.scrollWidth - frame.clientWidth) / 2, 0);
    const selected = part.boxes.get(kept.selected);
    select(selected?.element?.isConnected ? selected : null);
  }

  // At first modules are unfolded that hold most of what is around them, but not long rows of layers.
  function openFirst(part, box) {
    kept.open.add(box.key);
    for (const child of part.children(box)) {
      const most = child.kind === "module" && child.sums.nodes > 0.5 * box.sums.nodes && !/^\d+$/.test(child.name);
      if (most && blocks(child).length <= STACK && part.children(child).length <= 40) openFirst(part, child);
    }
  }

  // The children of a module that are numbered, such as layers.0, layers.1.
  const blocks = (box) => shown.part.children(box).filter((child) => child.kind === "module" && /^\d+$/.test(child.name));

  // ---------------------------------------------------------------------------------------------------- boxes
  const isOpen = (box) => Boolean(box.drawing?.items.length) && (box === shown.root || kept.open.has(box.key));

  function make(box) {
    const element = el("div", { class: `box ${box.kind}`, "data-key": box.key, "data-kind-of-box": box.kind,
      "data-fqn": box.fqn || null, "data-node": box.node ? box.node.name : null });
    if (box.kind === "module" && blocks(box).length > 1) element.classList.add("stack");
    box.element = element;
    box.head = pressable(el("div", { class: "head", role: "button" }), () => press(box));
    element.append(box.head);
    fill(box);
    return element;
  }

  // The content of a box, folded or not. The box itself stays, so that focus and what is around it stay too.
  function fill(box) {
    box.size = null;
    box.body?.remove();
    box.body = null;
    if (box.head) {
      box.head.replaceChildren(...headOf(box).flat(Infinity).filter(Boolean));
      if (box.drawing) box.head.setAttribute("aria-expanded", String(isOpen(box)));
    }
    box.element.classList.toggle("open", isOpen(box) && box !== shown.root);
    if (!isOpen(box)) return;
    const children = shown.part.children(box);
    box.edges = el("svg:svg", { class: "edges", "aria-hidden": "true" });
    box.body = el("div", { class: "inner" }, box.edges, children.map(make));
    box.element.append(box.body);
  }

  function headOf(box) {
    if (box.kind === "node") return nodeHead(box.node);
    if (box.kind === "input") return inputHead(box.input);
    if (box.kind === "output") return [el("span", { class: "name" }, box.name), chip("send", bytes(box.node.bytes))];
    return moduleHead(box);
  }

  // What comes from another stage says from which one.
  function inputHead(input) {
    const step = { received: -1, received_grad: 1 }[input.kind];
    return [el("span", { class: "name" }, input.name), placed(input.type),
      step ? chip("send", `from stage ${shown.part.stage + step}`) : null];
  }

  function nodeHead(node) {
    const title = el("span", { class: "line" }, el("b", { class: "mono" }, node.op),
      node.wire ? chip(node.wire.kind, [axes(node.wire.axis), ` ${bytes(node.wire.bytes)}`]) : null);
    return [title, node.type === "none" ? null : placed(node.type)];
  }

  function moduleHead(box) {
    const many = blocks(box).length;
    const name = box.kind === "run" ? box.name : /^\d+$/.test(box.name) ? box.fqn.split(".").slice(-2).join(".") : box.name;
    const amount = many > 1 ? `${many} blocks` : `${count(box.sums.nodes)} ${box.sums.nodes === 1 ? "node" : "nodes"}`;
    const title = el("span", { class: "line" }, el("span", { class: "fold" }, isOpen(box) ? "▾" : "▸"),
      el("span", { class: box.kind === "run" ? "name mono" : "name" }, name),
      el("span", { class: "soft" }, box.sums.flops ? `${amount} · ${flops(box.sums.flops)}` : amount));
    const chips = wireChips(box);
    return [title, isOpen(box) ? chips : [paramLine(box), chips]];
  }

  // One chip per kind and axis: calls and bytes of all of them.
  function wireChips(box) {
    const { wires } = box.sums;
    if (!wires.length) return null;
    return el("span", { class: "line" }, wires.map(([kind, axis, calls, sent]) =>
      chip(kind, [axes(axis), calls > 1 ? ` ${calls} × ${bytes(sent / calls)}` : ` ${bytes(sent)}`])));
  }

  function paramLine(box) {
    if (box.kind !== "module" || direction(shown.part) === "backward") return null;
    const params = shown.strategy.paramsOf(box.fqn, shown.part.stage);
    if (!params.length) return null;
    const own = params.filter((param) => !param.fqn.slice(box.fqn.length + 1).includes("."));
    if (own.length === params.length && own.length <= 2) {
      return own.map((param) => el("span", { class: "line" }, el("span", { class: "soft" }, param.fqn.split(".").at(-1)), placed(param.type)));
    }
    const sizes = params.reduce((sum, param) => sum + param.bytes, 0);
    const cuts = new Map();
    for (const param of params) {
      const axes = [...param.type.matchAll(/@(\w+)/g)].map((match) => match[1]);
      for (const axis of new Set(axes)) cuts.set(axis, (cuts.get(axis) ?? 0) + 1);
    }
    return el("span", { class: "line" }, el("span", { class: "soft" }, `${params.length} params, ${bytes(sizes)}`),
      [...cuts].map(([axis, times]) => el("span", { class: "mono soft" }, `${times}`, placed(`@${axis}`))));
  }

  // --------------------------------------------------------------------------------------------------- layout
  // Sizes from the inside out: first all boxes whose content is new, then the places in this one.
  function arrange(box) {
    const children = shown.part.children(box);
    for (const child of children) if (!child.size && isOpen(child)) arrange(child);
    for (const child of children) child.size ??= [child.element.offsetWidth, child.element.offsetHeight];
    const labels = box.drawing.edges.map((edge) => label(edge, children));
    const placed_ = graph.layout(box.drawing, children.map((child) => child.size), labels);
    children.forEach((child, i) => {
      child.element.style.left = `${placed_.at[i][0]}px`;
      child.element.style.top = `${placed_.at[i][1]}px`;
    });
    const [width, height] = [Math.ceil(placed_.width), Math.ceil(placed_.height)];
    box.body.style.width = `${width}px`;
    box.body.style.height = `${height}px`;
    drawEdges(box, children, placed_.edges, labels, width, height);
  }

  // Edges between single nodes say what they carry when they are pointed at, others always.
  function label([path, sent, , , wire], children) {
    if (wire && children[path[0]].node?.wire) return ""; // its box says so already
    if (wire) return `${fxpar.code(wire[0])} ${bytes(wire[1])} · ${ms(wire[2])}`;
    const ends = [children[path[0]], children[path.at(-1)]];
    return ends.every((end) => end.kind === "node" || end.kind === "input") || !sent ? "" : bytes(sent);
  }

  function drawEdges(box, children, routes, labels, width, height) {
    const { strings } = shown.section.tables;
    box.edges.setAttribute("width", width);
    box.edges.setAttribute("height", height);
    const texts = [];
    const paths = box.drawing.edges.map((edge, e) => {
      const [path, sent, values, type, wire, back] = edge;
      const d = routes[e].d;
      const group = el("svg:g", { class: `edge${back ? " back" : ""}`, "data-kind": wire ? wire[0] : null,
        "data-from": children[path[0]].key, "data-to": children[path.at(-1)].key },
      el("svg:path", { class: "hit", d }), el("svg:path", { class: "line", d }));
      tip(group, () => edgeTip(strings[type], sent, values, wire));
      if (labels[e] && free(texts, routes[e], labels[e])) {
        group.append(el("svg:text", { x: routes[e].x, y: routes[e].y }, labels[e]));
      }
      return group;
    });
    box.edges.replaceChildren(...paths);
  }

  // A label that would cover another one is left out; pointing at the edge shows it.
  function free(texts, { x, y }, text) {
    const mine = [x, x + text.length * 6.1, y];
    if (texts.some(([from, to, at]) => Math.abs(at - y) < 12 && from < mine[1] && mine[0] < to)) return false;
    texts.push(mine);
    return true;
  }

  function edgeTip(type, sent, values, wire) {
    const several = values > 1 ? `${values} values, ${bytes(sent)} per rank, the first ` : sent ? `${bytes(sent)} per rank, ` : "";
    const line = el("div", {}, several, placed(type));
    if (!wire) return line;
    return el("div", {}, line, el("div", {}, chip(wire[0], bytes(wire[1])), ` on the wire, predicted ${ms(wire[2])}`));
  }

  // --------------------------------------------------------------------------------------------- what users do
  function press(box) {
    if (box.drawing) toggle(box);
    select(box);
  }

  function toggle(box) {
    kept.touched = true;
    const before = box.head.getBoundingClientRect();
    if (kept.open.has(box.key)) kept.open.delete(box.key);
    else kept.open.add(box.key);
    refill(box);
    const after = box.head.getBoundingClientRect();
    shown.frame.scrollBy(after.left - before.left, after.top - before.top);
  }

  // Draw a box again and move what is around it.
  function refill(box) {
    fill(box);
    if (isOpen(box)) arrange(box);
    for (let outer = box.parent; outer; outer = outer.parent) {
      box.size = null;
      arrange(outer);
      box = outer;
    }
    zoomTo(kept.zoom);
  }

  function select(box) {
    kept.selected = box?.key ?? "";
    for (const marked of shown.canvas.querySelectorAll(".selected, .edge.on")) marked.classList.remove("selected", "on");
    shown.side.replaceChildren(...graph.panel(shown.part, box, go).flat(Infinity).filter(Boolean));
    shown.side.scrollTop = 0;
    if (!box) return;
    box.element.classList.add("selected");
    for (const edge of box.parent?.edges?.childNodes ?? []) {
      if (edge.dataset.from === box.key || edge.dataset.to === box.key) edge.classList.add("on");
    }
  }

  // Show a node or a box of this strategy, wherever it is: unfold what is around it and scroll there.
  function go(part, target) {
    let box = target.key ? target : part.boxOf(target);
    if (!box) {
      part = shown.strategy.parts.find((other) => other.graph === part.graph && other.boxOf(target)) ?? part;
      box = part.boxOf(target);
    }
    if (!box) return;
    if (part !== shown.part) showPart(part);
    reveal(box);
    select(box);
  }

  function reveal(box) {
    const around = [];
    for (let outer = box.parent; outer; outer = outer.parent) around.unshift(outer);
    const folded = around.find((outer) => !isOpen(outer));
    kept.touched = true;
    for (const outer of around) kept.open.add(outer.key);
    if (folded) refill(folded);
    const frame = shown.frame.getBoundingClientRect();
    const at = box.head.getBoundingClientRect();
    shown.frame.scrollBy(at.left + at.width / 2 - frame.left - frame.width / 2, at.top - frame.top - frame.height / 3);
  }

  function showPart(part) {
    [kept.direction, kept.stage] = [direction(part), part.stage ?? 0];
    shown.part = part;
    const chosen = document.activeElement?.closest?.("#graph-parts") ? document.activeElement.dataset : {};
    const row = partRow(shown.strategy, part); // each stage has parts of its own
    document.getElementById("graph-parts").replaceWith(row);
    const same = (button) => button.dataset.part === chosen.part && button.dataset.stage === chosen.stage;
    if (chosen.part || chosen.stage) ([...row.querySelectorAll("button")].find(same) ?? row.querySelector("button"))?.focus();
    drawPart();
  }

  // --------------------------------------------------------------------------------------------------- tools
  function partRow(strategy, part) {
    const stages = [...new Set(strategy.parts.map((one) => one.stage))];
    const here = strategy.parts.filter((one) => one.stage === part.stage);
    const directions = here.map((one) => el("button", { type: "button", "data-part": one.id,
      "aria-pressed": String(one === part), title: one.about, onclick: () => showPart(one) }, one.title));
    const pick = (stage) => () => {
      kept.stage = stage;
      showPart(choosePart(strategy));
    };
    return el("div", { class: "row", id: "graph-parts" },
      stages.length > 1 ? el("div", { class: "pills", role: "group", "aria-label": "Pipeline stage" }, stages.map((stage) =>
        el("button", { type: "button", "data-stage": stage, "aria-pressed": String(stage === part.stage), onclick: pick(stage) },
          `Stage ${stage}`))) : null,
      el("div", { class: "pills", role: "group", "aria-label": "Part" }, directions));
  }

  function searchBox() {
    const hits = el("ul", { class: "hits", id: "graph-hits", role: "listbox", hidden: true });
    const input = el("input", { type: "search", id: "graph-search", placeholder: "Find: all_gather, layers.3.*, *.q_proj",
      "aria-label": "Find modules and nodes", "aria-controls": "graph-hits", autocomplete: "off", spellcheck: "false" });
    const note = el("span", { class: "soft", "aria-live": "polite", id: "graph-found" });
    let found = [];
    let at = -1;
    const jump = (i) => {
      at = i;
      hits.hidden = true;
      note.textContent = `${i + 1} of ${found.length}`;
      const { part, box, node } = found[i];
      go(part, box ?? node);
    };
    const look = () => {
      found = input.value.trim() ? everywhere(input.value.trim()) : [];
      at = -1;
      note.textContent = input.value.trim() ? `${found.length} found` : "";
      hits.replaceChildren(...found.slice(0, MOST_HITS).map((hit, i) =>
        el("li", {}, el("button", { type: "button", role: "option", onclick: () => jump(i) }, ...hitText(hit)))));
      hits.hidden = !found.length;
    };
    input.addEventListener("input", look);
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && found.length) jump((at + (event.shiftKey ? -1 : 1) + found.length) % found.length);
      if (event.key === "Escape") hits.hidden = true;
      if (event.key === "ArrowDown" && !hits.hidden) hits.querySelector("button").focus();
    });
    const box = el("div", { class: "find" }, input, note, hits);
    box.addEventListener("focusout", (event) => {
      if (!box.contains(event.relatedTarget)) hits.hidden = true;
    });
    return box;
  }

  // What matches in the part that is shown, then in all others.
  function everywhere(text) {
    const others = shown.strategy.parts.filter((part) => part !== shown.part);
    return [shown.part, ...others].flatMap((part) => graph.search(part, text).map((hit) => ({ part, ...hit })));
  }

  function hitText({ part, box, node }) {
    const where = part === shown.part ? null : el("span", { class: "soft", "data-hit-part": part.id }, ` · ${part.place}`);
    if (box) return [el("b", {}, box.fqn), el("span", { class: "soft" }, ` ${count(box.sums.nodes)} nodes`), where].filter(Boolean);
    return [el("b", { class: "mono" }, `%${node.name}`), el("span", { class: "soft" }, ` ${node.fqn}`), where].filter(Boolean);
  }

  function zoomRow() {
    const step = (factor) => () => zoomTo(Math.min(2, Math.max(0.2, kept.zoom * factor)));
    const fit = () => zoomTo(Math.min(1, (shown.frame.clientWidth - 32) / shown.canvas.offsetWidth));
    const fold = () => {
      kept.open.clear();
      kept.touched = false;
      drawPart();
    };
    const button = (text, action, name) => el("button", { type: "button", class: "quiet", "aria-label": name, title: name, onclick: action }, text);
    return el("div", { class: "row tight" }, button("−", step(1 / 1.2), "Smaller"), button("+", step(1.2), "Larger"),
      button("Fit", fit, "Fit the width"), button("Fold", fold, "Fold all that was unfolded"));
  }

  function zoomTo(zoom) {
    kept.zoom = zoom;
    const { canvas } = shown;
    canvas.style.transform = zoom === 1 ? "" : `scale(${zoom})`;
    canvas.parentNode.style.width = `${canvas.offsetWidth * zoom}px`;
    canvas.parentNode.style.height = `${canvas.offsetHeight * zoom}px`;
  }

  fxpar.register("graph", "Graph", render);
})();
