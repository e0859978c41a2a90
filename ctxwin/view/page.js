// The page: draws what the model holds, moves the selection, and takes new lines of a run that is going on.

const CONFIG = JSON.parse(document.getElementById("data").textContent);
const model = new Model(CONFIG.limit, CONFIG.left_out);
const $ = (id) => document.getElementById(id);
const DETAILS = $("details"); // moves into cards on a narrow screen
const drawn = new Map(); // step key: { signature, item }
const sheet = document.head.appendChild(document.createElement("style")).sheet;
let scene = { steps: [], windows: [], most: 1 };
let selected = null, chunk = null;
const narrow = matchMedia("(max-width: 700px)");

function feed(line) {
  model.feed(line);
  if (line.kind === "chunk" && line.thumbnail && /^[A-Za-z0-9+/=]+$/.test(line.thumbnail))
    sheet.insertRule(`.c${Number(line.n)}{background-image:url(data:image/jpeg;base64,${line.thumbnail})}`);
}

// As high as the rows of the steps in sight: a branch further right takes no room before it is there.
function fit() {
  const { scrollLeft, clientWidth } = $("scroll");
  const seen = scene.steps.filter((step) => step.x + COLUMN > scrollLeft && step.x < scrollLeft + clientWidth);
  const height = Math.max(0, ...(seen.length ? seen : scene.steps).map((step) => step.top + step.height)) + 10;
  $("steps").style.setProperty("--height", `${height}px`);
  $("lines").setAttribute("height", height);
}

function draw() {
  const { steps, windows } = model.build($("apart").checked);
  const asks = steps.map((step) => step.ask).filter(Boolean);
  const most = Math.max(1, ...asks.flatMap((ask) => [ask.usage.prompt_tokens, ...Object.values(ask.costs || {})]));
  scene = { model, steps, windows, most };
  const size = layOut(steps, windows);
  const list = $("steps");
  const atEnd = $("scroll").scrollLeft + $("scroll").clientWidth >= $("scroll").scrollWidth - COLUMN;
  const known = new Set(steps.map((step) => step.key));
  for (const [key, { item }] of drawn) if (!known.has(key)) (item.remove(), drawn.delete(key));
  for (const step of steps) {
    const signature = JSON.stringify([step.index, step.tiles, step.left, step.ask, operations(step), most, windows.length > 1]);
    let old = drawn.get(step.key);
    if (!old) {
      old = { item: el("li", { "data-key": step.key }) };
      drawn.set(step.key, old);
    }
    if (old.signature !== signature) {
      const focused = old.item.contains(document.activeElement);
      old.item.replaceChildren(...stepContents(model, step, scene).filter(Boolean));
      old.signature = signature;
      if (focused) old.item.querySelector("button").focus();
    }
    old.item.className = `step ${step.window.parent ? "in-branch" : ""}`;
    old.item.style.setProperty("--depth", step.window.row);
    old.item.style.setProperty("--x", `${step.x}px`);
    old.item.style.setProperty("--y", `${step.top}px`);
    old.item.style.setProperty("--h", `${step.height}px`);
    if (list.children[step.index] !== old.item) list.insertBefore(old.item, list.children[step.index] || null);
  }
  list.style.setProperty("--width", `${size.width}px`);
  lines($("lines"), windows, size);
  $("totals").replaceChildren(...totalsOf(model, scene).filter(Boolean));
  const bars = overviewOf(scene, (key) => select(key, { show: true }));
  $("overview").replaceChildren(...bars);
  $("overview-box").hidden = bars.length < 2;
  $("scale").textContent = `${count(most)} tokens`;
  $("empty").hidden = steps.length > 0;
  $("picture").hidden = steps.length === 0;
  fit();
  const out = `${many(model.leftOut, "earlier operation")} left out; the totals leave them out, too.`;
  $("left-out").textContent = model.leftOut ? out : "";
  legend();
  const other = steps.map((step) => step.ask && Object.keys(step.ask.costs || {})[0]).find(Boolean);
  for (const item of document.querySelectorAll(".first-other")) item.hidden = !other;
  for (const item of document.querySelectorAll(".other-name")) item.textContent = other || "";
  const follow = CONFIG.live && $("follow").checked;
  const start = follow ? steps.at(-1) : steps.find((step) => step.ask) || steps[0];
  if (steps.length && (follow || !known.has(selected))) selected = start.key;
  if (steps.length) select(selected, { show: follow && atEnd });
}

// Only the lanes and marks that occur.
function legend() {
  for (const item of document.querySelectorAll(".several")) item.hidden = scene.windows.length < 2;
  const lanes = new Set(scene.steps.flatMap((step) => (step.ask ? shares(step.ask).map(([lane]) => lane) : [])));
  const marks = new Set(scene.steps.flatMap((step) => [...step.tiles.map((p) => p.mark), ...(step.left.length ? ["left"] : [])]));
  for (const item of $("legend").children) {
    if (item.dataset.lane) item.hidden = !lanes.has(item.dataset.lane);
    if (item.dataset.mark) item.hidden = !marks.has(item.dataset.mark);
  }
}

function select(key, { focus = false, show = false, follow = chunk } = {}) {
  const step = scene.steps.find((s) => s.key === key);
  if (!step) return;
  selected = key;
  chunk = follow;
  for (const [k, { item }] of drawn) {
    const mine = k === key;
    item.classList.toggle("selected", mine);
    const head = item.querySelector("button");
    head.tabIndex = mine ? 0 : -1;
    if (mine) head.setAttribute("aria-current", "step");
    else head.removeAttribute("aria-current");
    if (mine && focus) head.focus({ preventScroll: true });
    if (mine && (focus || show)) reveal(item);
  }
  for (const bar of $("overview").children) bar.classList.toggle("selected", bar.dataset.key === String(key));
  DETAILS.replaceChildren(...detailsOf(model, scene, step));
  place(step);
  trail();
}

function reveal(item) {
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  item.scrollIntoView({ block: "nearest", inline: "center", behavior: calm ? "instant" : "smooth" });
}

// On a narrow screen the details stand in the selected card.
function place(step) {
  const home = narrow.matches ? drawn.get(step.key).item : $("home");
  if (DETAILS.parentElement !== home) home.append(DETAILS);
}

// One chunk, followed through all steps.
function trail() {
  for (const tile of document.querySelectorAll(".followed")) tile.classList.remove("followed");
  if (chunk) for (const tile of document.querySelectorAll(`[data-p="${CSS.escape(chunk)}"]`)) tile.classList.add("followed");
}

function move(event) {
  const at = scene.steps.findIndex((step) => step.key === selected);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: scene.steps.length - 1 }[event.key];
  if (to !== undefined && scene.steps[to]) select(scene.steps[to].key, { focus: true });
  else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    const tiles = [...scene.steps[at].tiles, ...scene.steps[at].left];
    const now = tiles.findIndex((p) => p.id === chunk);
    const next = event.key === "ArrowDown" ? now + 1 : now < 0 ? tiles.length - 1 : now - 1;
    select(selected, { follow: tiles[next] ? tiles[next].id : null });
    $("said").textContent = tiles[next] ? `follows ${describe(model.chunks.get(tiles[next].chunk)).name}` : "follows nobody";
  } else if (event.key === "Enter" || event.key === " ") {
    DETAILS.hidden = false;
    DETAILS.focus();
    reveal(DETAILS);
  } else if (to === undefined) return;
  event.preventDefault();
}

$("steps").addEventListener("keydown", (event) => {
  if (!event.target.closest("#details")) move(event);
});
// Nothing needs the focus first: the arrows move the selection as long as nothing else has taken them.
document.addEventListener("keydown", (event) => {
  const free = event.target === document.body || event.target === document.documentElement;
  const plain = !(event.altKey || event.ctrlKey || event.metaKey || event.shiftKey);
  if (free && plain && scene.steps.length && (event.key === "ArrowLeft" || event.key === "ArrowRight")) move(event);
});
$("steps").addEventListener("click", (event) => {
  const item = event.target.closest(".step");
  if (!item || event.target.closest("#details")) return;
  const tile = event.target.closest(".tile[data-p]");
  const follow = tile && tile.dataset.p !== chunk ? tile.dataset.p : tile ? null : chunk;
  const step = scene.steps.find((s) => String(s.key) === item.dataset.key);
  // On a narrow screen another tap on the head closes the card again.
  DETAILS.hidden = narrow.matches && !DETAILS.hidden && step.key === selected && !tile;
  select(step.key, { focus: true, follow });
});
DETAILS.addEventListener("keydown", (event) => {
  if (event.key === "Escape") (event.stopPropagation(), select(selected, { focus: true }));
});
$("apart").addEventListener("change", draw);
$("scroll").addEventListener("scroll", fit);
window.addEventListener("resize", fit);
narrow.addEventListener("change", () => {
  DETAILS.hidden = false;
  if (selected !== null) select(selected);
});

function listen() {
  const source = new EventSource(CONFIG.live);
  let waiting = null;
  source.addEventListener("line", (event) => {
    feed(JSON.parse(event.data));
    // A fast run sends many lines at once: drawn together.
    waiting = waiting || setTimeout(() => ((waiting = null), draw()), 200);
  });
  source.addEventListener("reset", () => location.reload());
  source.addEventListener("open", () => ($("state").textContent = "live"));
  source.addEventListener("error", () => ($("state").textContent = "the run's server does not answer; trying again"));
}

DETAILS.hidden = narrow.matches;
CONFIG.lines.forEach(feed);
draw();
if (CONFIG.live) {
  $("live").hidden = false;
  listen();
}
