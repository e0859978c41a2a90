// Steps as columns of tiles (a wide screen) or as cards (a narrow one, where CSS ignores the places set here).

const COLUMN = 140, GAP = 26, TILE = 54, HEAD = 50, ASK = 132, SPACE = 40, MOST = 14;
const SVG = "http://www.w3.org/2000/svg";
const WORDS = { watch: "start", look_back: "look back", prepare_orbit: "prepare orbit" };
const MARKS = {
  new: ["+", "new"], back: ["↩", "back"], moved: ["↕", "moved"], toggled: ["○", "toggled"], remembered: ["+", "remembered"],
  left: ["×", "left"], again: ["↻", "placed again"],
};
const PASSED = { back: "came back, left at once", new: "arrived, left at once" };

function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("aria-") || name === "role" || name.startsWith("data-")) made.setAttribute(name, value);
    else if (name.startsWith("--")) made.style.setProperty(name, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

const soft = (text) => el("span", { className: "soft" }, text);
const swatch = (lane) => el("span", { className: `swatch lane-${lane}`, "aria-hidden": "true" });
const many = (n, one, more = one + "s") => `${count(n)} ${n === 1 ? one : more}`;
const count = (n) => Math.round(n).toLocaleString("en");
const seconds = (s) => (s < 1 ? `${(1000 * s).toFixed(s < 0.01 ? 1 : 0)} ms` : `${s.toFixed(1)} s`);
const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(part && part < whole / 10 ? 1 : 0)} %` : "–");

function describe(chunk) {
  if (!chunk) return { name: "?", kind: "unknown" };
  const kind = chunk.what === "video" ? `clip of ${chunk.frames} frames` : chunk.role ? `${chunk.role} message` : chunk.what;
  return { name: chunk.label || chunk.text || kind, kind };
}

// The tile of a chunk. `mark` may be "left": then it shows who is gone.
function tile(model, p, note) {
  const chunk = model.chunks.get(p.chunk);
  const { name, kind } = describe(chunk);
  const [sign, plain] = MARKS[p.mark] || ["", ""];
  const word = PASSED[p.passed] || plain;
  const clean = p.conditioned === false && !p.lane ? "clean" : "";
  const lane = p.mark === "left" ? "" : p.lane || clean;
  const words = [word, p.pinned ? "pinned" : ""].filter(Boolean).join(" · ");
  return el(
    "li",
    {
      className: `tile ${p.mark || ""} ${lane ? "lane-" + lane : ""}`, "data-p": p.id,
      title: [name, note || kind, lane, words].filter(Boolean).join(", "),
    },
    picture(chunk),
    el("span", { className: "name" }, sign ? el("b", { "aria-hidden": "true" }, sign + " ") : "", name),
    el("span", { className: "words" }, lane || (p.mark === "left" ? "" : "not asked")),
    el("span", { className: "words" }, words),
  );
}

function picture(chunk) {
  if (chunk && chunk.thumbnail) return el("span", { className: `pic c${chunk.n}`, "aria-hidden": "true" });
  const sign = chunk && (chunk.what === "image" || chunk.what === "video") ? "▦" : "“”";
  return el("span", { className: "pic none", "aria-hidden": "true" }, sign);
}

// At most MOST tiles: what happened to somebody, the first ones and the last ones; the others are counted.
function shown(tiles) {
  if (tiles.length <= MOST) return tiles.map((p) => ({ p }));
  const keep = new Set(tiles.map((p, i) => (p.mark ? i : -1)).filter((i) => i >= 0).slice(0, MOST));
  for (let k = 0; keep.size < MOST - 1; k++) keep.add(k % 2 ? tiles.length - 1 - (k >> 1) : k >> 1);
  const out = [];
  for (const [i, p] of tiles.entries()) {
    if (keep.has(i)) out.push({ p });
    else if (out.length && out.at(-1).hidden) out.at(-1).hidden.push(p);
    else out.push({ hidden: [p] });
  }
  return out;
}

function operations(step) {
  if (step.test) return ["test"];
  const words = [];
  for (const event of step.events) {
    let word = WORDS[event.op] || event.op;
    if (event.op === "fork") word = `fork ${step.branches.find((b) => b.id === event.other)?.name || ""}`;
    else if (event.op === "adopt") word = `adopt ${step.adopted ? step.adopted.name : ""}`;
    else if (event.op === "toggle") word = `toggle ${event.note}`;
    else if (event.op === "disposable") word = "test what matters";
    if (!words.includes(word)) words.push(word);
  }
  return words.length > 1 ? words.filter((word) => word !== "ask") : words;
}

// Tokens of a prompt by lane, those that went through a forward first.
function shares(ask) {
  const lanes = ask.usage.reused_tokens;
  const known = Object.values(lanes).reduce((a, b) => a + b, 0);
  const query = ask.usage.prompt_tokens - known;
  const order = ["computed", "formed", ...Object.keys(CONFIG.lanes), ...Object.keys(lanes)];
  const out = [...new Set(order)].filter((lane) => lanes[lane]).map((lane) => [lane, lanes[lane]]);
  if (query > 0) out.splice(out.filter(([lane]) => lane === "computed" || lane === "formed").length, 0, ["query", query]);
  return out;
}

function bar(ask, most) {
  const width = (n) => `${Math.min(100, (100 * n) / most)}%`;
  const part = ([lane, n]) => el("span", { className: `part lane-${lane}`, "--w": width(n), title: `${lane}: ${n} tokens` });
  const other = Object.entries(ask.costs || {})[0];
  const theirs = other && el("span", { className: "theirs", "--w": width(other[1]), title: `${other[0]}: ${other[1]} tokens` });
  return el("div", { className: "bar", "aria-hidden": "true" }, el("div", { className: "parts" }, ...shares(ask).map(part)), theirs);
}

const encodes = (step) => step.events.reduce((total, event) => total + (event.encodes || 0), 0);

function verdict(ask) {
  if (ask.truth === undefined) return null;
  if (right(ask)) return el("span", { className: "good", title: "right" }, " ✓");
  return el("span", { className: "bad" }, ` ✗ truth: ${ask.truth}`);
}

function askBlock(step, scene) {
  const tested = step.events.find((event) => event.op === "disposable");
  if (tested) {
    const about = step.placed.find((p) => p.id === (tested.ids || [])[0]);
    const who = about ? describe(scene.model.chunks.get(about.chunk)).name : "it";
    const question = `does “${who}” matter for “${tested.query || ""}”?`;
    return el("div", { className: "ask" }, el("p", { className: "q" }, question), el("p", { className: "a" }, `→ ${tested.note}`));
  }
  const ask = step.ask;
  if (!ask) return null;
  const { computed_tokens, prompt_tokens, ttft_s } = ask.usage;
  return el(
    "div", { className: "ask" },
    el("p", { className: "q" }, ask.query),
    el("p", { className: "a" }, `→ ${ask.answer.trim() || "(nothing)"}`, verdict(ask)),
    bar(ask, scene.most),
    el("p", { className: "cost" }, el("b", {}, count(computed_tokens)), ` of ${count(prompt_tokens)} computed`),
    el("p", { className: "cost" }, `${many(encodes(step), "encode")} · ${seconds(ttft_s)}`),
  );
}

// The contents of one step's list item.
function stepContents(model, step, scene) {
  const name = scene.windows.length > 1 ? el("span", { className: "window" }, step.window.name) : "";
  const head = el(
    "button", { type: "button", className: "head", tabIndex: -1 },
    el("span", { className: "when" }, name, ` step ${step.index + 1}`, step.old ? `, version ${step.ask.version}` : ""),
    el("span", { className: "ops" }, operations(step).join(" · ")),
  );
  const tiles = shown(step.tiles).map(({ p, hidden }) =>
    p ? tile(model, p) : el("li", { className: "tile more" }, `… ${hidden.length} more`));
  const strip = el("ol", { className: "strip", "aria-label": "placed, in prompt order" }, ...tiles);
  if (!tiles.length) strip.append(el("li", { className: "tile more" }, "(empty)"));
  const gone = shown(step.left.map((p) => ({ ...p, mark: "left" }))).slice(0, 3);
  const rest = step.left.length - gone.length;
  const out = gone.map(({ p }) => tile(model, p, PASSED[p.passed] || "left the window"));
  if (rest > 0) out.push(el("li", { className: "tile more" }, `… ${rest} more left`));
  const leaving = out.length ? el("ol", { className: "strip gone", "aria-label": "left the window" }, ...out) : null;
  return [head, strip, leaving, askBlock(step, scene)];
}

// Places of everything: x and y of steps, y of each tile in its step.
function layOut(steps, windows) {
  const total = rows(windows);
  const tall = Array(total).fill(0);
  for (const step of steps) {
    const items = shown(step.tiles);
    step.y = new Map();
    items.forEach(({ p, hidden }, i) => (p ? [p] : hidden).forEach((q) => step.y.set(q.id, HEAD + i * TILE + TILE / 2 - 2)));
    const inside = Math.max(1, items.length);
    step.left.slice(0, 3).forEach((p, i) => step.y.set(p.id, HEAD + (inside + i) * TILE + TILE / 2 + 6));
    const height = inside + Math.min(4, step.left.length);
    tall[step.window.row] = Math.max(tall[step.window.row], HEAD + height * TILE + ASK + 14);
  }
  const tops = tall.map((_, row) => 12 + tall.slice(0, row).reduce((a, b) => a + b + SPACE, 0));
  for (const step of steps) {
    step.x = step.index * (COLUMN + GAP) + 8;
    step.top = tops[step.window.row];
    step.height = tall[step.window.row];
  }
  const bottom = total ? tops[total - 1] + tall[total - 1] : 0;
  return { width: steps.length * (COLUMN + GAP), height: bottom + 10 };
}

const curve = (x1, y1, x2, y2) => {
  const bend = Math.min(60, Math.max(12, (x2 - x1) / 2));
  return `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
};

// From a step to one of another row, through the space between the rows.
function joint(from, to) {
  const down = to.top > from.top;
  const [x1, y1] = [from.x + COLUMN * (down ? 0.5 : 0.8), down ? from.top + from.height + 2 : from.top - 4];
  const [x2, y2] = [to.x + COLUMN * (down ? 0.3 : 0.5), down ? to.top - 6 : to.top + to.height + 4];
  const middle = (y1 + y2) / 2;
  return `M${x1} ${y1}C${x1} ${middle} ${x2} ${middle - (y2 - y1) / 4} ${x2} ${y2}`;
}

// Lines behind the steps: who stayed, who left, who came back; branches from their fork to their adoption.
function lines(svg, windows, size) {
  const stays = [], leaves = [], returns = [], forks = [], adopts = [], boxes = [];
  for (const w of windows) {
    const own = w.steps.filter((step) => !step.old);
    for (const [i, step] of own.entries()) {
      const before = own[i - 1];
      for (const p of step.tiles) {
        const y = step.top + step.y.get(p.id);
        if (p.mark === "back") returns.push(`M${step.x - 21} ${y + 22}Q${step.x - 18} ${y} ${step.x - 2} ${y}`);
        else if (before && before.y.has(p.id)) stays.push(curve(before.x + COLUMN, before.top + before.y.get(p.id), step.x, y));
      }
      for (const p of before ? step.left : []) {
        if (before.y.has(p.id) && step.y.has(p.id))
          leaves.push(curve(before.x + COLUMN, before.top + before.y.get(p.id), step.x - 1, step.top + step.y.get(p.id)));
      }
      if (step.adopted && step.adopted.steps.length) {
        const last = step.adopted.steps.at(-1);
        adopts.push(joint(last, step));
      }
    }
    if (w.parent) {
      const first = w.steps[0], last = w.steps.at(-1);
      boxes.push([first.x - 6, first.top - 4, last.x + COLUMN + 6 - first.x + 6, first.height + 4]);
      if (w.from) forks.push(joint(w.from, first));
    }
  }
  svg.setAttribute("width", size.width);
  svg.setAttribute("height", size.height);
  svg.replaceChildren(svg.querySelector("defs"));
  for (const [x, y, width, height] of boxes) add(svg, "rect", { class: "branch", x, y, width, height, rx: 10 });
  if (stays.length) add(svg, "path", { class: "stays", d: stays.join("") }); // they carry no arrow: one element will do
  for (const [kind, paths] of Object.entries({ leaves, returns, forks, adopts }))
    for (const d of paths) add(svg, "path", { class: kind, d });
}

function add(svg, tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  svg.append(made);
}
