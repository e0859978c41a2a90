// The totals above the picture, and everything about the selected step below it.

function totalsOf(model, scene) {
  const t = model.totals();
  const steps = scene.steps.filter((step) => !step.adopted); // an adoption repeats what happened in the branch
  const marked = (mark) => steps.reduce((n, step) => n + step.tiles.filter((p) => p.mark === mark).length
    + step.left.filter((p) => p.passed === mark).length, 0);
  const gone = steps.reduce((n, step) => n + step.left.length, 0);
  const moves = `${count(marked("new"))} · ${count(gone)} · ${count(marked("back"))}`;
  const branches = scene.windows.filter((w) => w.parent).length;
  const others = Object.entries(t.right_others).map(([name, n]) => `; ${name}: ${count(n)}`).join("");
  const known = t.known ? `${count(t.right)} of ${count(t.known)} answered right${others}` : "";
  const tests = t.tests ? `; ${count(t.tests)} more asks tested what matters` : "";
  return [
    card(count(t.asks), t.asks === 1 ? "question asked" : "questions asked", known + tests),
    card(count(t.vision_encodes), t.vision_encodes === 1 ? "vision encode" : "vision encodes", "while it was recorded"),
    t.patches.some(Boolean)
      ? card(count(t.patches[1]), "patches served", `${count(t.patches[0])} formed, ${count(t.patches[2])} dropped`) : null,
    card(moves, "chunks arrived · left · came back", branches ? many(branches, "branch", "branches") : ""),
    costsOf(t),
  ];
}

// What was computed, beside what others would have computed for the same questions.
function costsOf(t) {
  if (!t.asks) return null;
  const share = (tokens) => `this window: ${percent(t.computed_tokens, tokens)} of it`;
  const apart = [[t.idle_tokens, "in idle time"], [t.test_tokens, "to test what matters"]].filter(([n]) => n);
  const beside = apart.map(([n, what]) => `${count(n)} of them ${what}`).join(", ");
  const rows = [["this window", t.computed_tokens, "ours", beside]];
  for (const [name, { tokens, asks }] of Object.entries(t.costs)) {
    const few = asks < 0.9 * t.asks; // a share of other questions would say nothing
    rows.push([name, tokens, "others", few ? `known for ${count(asks)} of ${count(t.asks)} questions only` : share(tokens)]);
  }
  rows.push(["everything, every time", t.prompt_tokens, "others", share(t.prompt_tokens)]);
  const most = Math.max(...rows.map((row) => row[1]), 1);
  const items = rows.map(([name, tokens, kind, note]) => line(name, tokens, most, kind, soft(note)));
  const list = el("ul", { className: "lines four" }, ...items);
  return el("div", { className: "card wide" }, el("dt", {}, "tokens computed"), el("dd", {}, list));
}

// A row of a bar chart.
function line(name, tokens, most, kind, note) {
  const bar = el("span", { className: `line ${kind}`, "--w": `${(100 * tokens) / most}%` });
  return el("li", {}, el("span", {}, name), bar, el("b", {}, count(tokens)), note);
}

function card(figure, name, note) {
  const value = el("dd", {}, el("b", {}, figure), note ? el("span", {}, note) : "");
  return el("div", { className: "card" }, el("dt", {}, name), value);
}

// Bars of every ask over the whole run; a click selects.
function overviewOf(scene, select) {
  const width = (n) => `${Math.min(100, (100 * n) / scene.most)}%`;
  return scene.steps.filter((step) => step.ask && !step.test).map((step) => {
    const parts = shares(step.ask).map(([lane, n]) => el("span", { className: `part lane-${lane}`, "--w": width(n) }));
    const other = Object.values(step.ask.costs || {})[0];
    const tick = other === undefined ? null : el("span", { className: "tick", "--w": width(other) });
    const title = `step ${step.index + 1}: ${step.ask.query}`;
    const made = el("div", { className: "column", "data-key": step.key, title }, ...parts, tick);
    made.addEventListener("click", () => select(step.key));
    return made;
  });
}

function detailsOf(model, scene, step) {
  const w = step.window;
  const begin = model.events.length ? model.events[0].time : 0;
  const at = step.events[0];
  const where = w.parent ? `branch ${w.name} of ${w.parent.name}` : scene.windows.length > 1 ? `window ${w.name}` : "the window";
  const facts = [
    `version ${step.events.at(-1).version}`, `${seconds(Math.max(0, at.time - begin))} after the start`,
    `${count(step.events.at(-1).tokens)} of ${count(at.budget)} tokens`, `${count(step.events.at(-1).evicted)} can be recalled`,
  ];
  if (w.systemPrompt) facts.push(`system prompt: ${w.systemPrompt}`);
  return [
    el("h2", { id: "details-title" }, `Step ${step.index + 1} of ${scene.steps.length}: ${where}`),
    el("p", { className: "soft" }, facts.join(" · ")),
    el("div", { className: "columns" }, asked(step), happened(model, scene, step), placedTable(model, step)),
  ];
}

function asked(step) {
  const ask = step.ask;
  if (!ask) return null;
  const u = ask.usage;
  const most = Math.max(u.prompt_tokens, u.computed_tokens, ...Object.values(ask.costs || {}), 1);
  const others = Object.entries(ask.costs || {}).map(([name, n]) => line(name, n, most, "others"));
  const lines = [line("ctxwin computed", u.computed_tokens, most, "ours"), ...others];
  const lanes = shares(ask).map(([lane, n]) => el("li", {}, swatch(lane), `${lane}: ${many(n, "token")}`));
  const facts = [
    `${count(u.prompt_tokens)} tokens in the prompt`, many(u.forwards, "forward"), many(encodes(step), "vision encode"),
    `${(u.bytes_loaded / 2 ** 20).toFixed(1)} MiB of KV loaded`, `first token after ${seconds(u.ttft_s)}${u.planned_s ? ` (planned: ${seconds(u.planned_s)})` : ""}`,
    `all of it after ${seconds(u.total_s)}`, u.exact ? "exact" : "approximate",
  ];
  if (u.misses) facts.push(many(u.misses, "stored chunk") + " missing, computed again");
  if (u.fallbacks) facts.push(many(u.fallbacks, "load") + " failed, computed again");
  if (ask.audit !== undefined) facts.push(`KL to a re-prefill ${ask.audit.toFixed(4)}`);
  return el(
    "section", {},
    el("h3", {}, "Asked"),
    el("p", { className: "question" }, ask.query),
    el("p", { className: "answer" }, ask.answer.trim() || "(nothing)", verdict(ask)),
    ...Object.entries(ask.answers || {}).map(([name, answer]) => el("p", { className: "soft" }, `${name}: ${answer || "(nothing)"}`)),
    ask.text ? el("p", { className: "soft" }, ask.text) : "",
    ask.idle ? el("p", { className: "soft" }, `${count(ask.idle)} more tokens were computed in idle time before.`) : "",
    el("h3", {}, "Tokens computed"),
    el("ul", { className: "lines" }, ...lines),
    el("h3", {}, "Where the prompt's KV came from"),
    el("ul", { className: "plain" }, ...lanes),
    el("p", { className: "soft" }, facts.join(" · ")),
  );
}

function happened(model, scene, step) {
  const named = new Map();
  for (const p of [...step.before, ...step.placed, ...step.events.flatMap((event) => event.placed)]) named.set(p.id, p.chunk);
  const windows = new Map(scene.windows.map((w) => [w.id, w.name]));
  const items = step.events.map((event) => {
    const who = (event.ids || []).map((id) => (named.has(id) ? describe(model.chunks.get(named.get(id))).name : id));
    const list = who.length > 8 ? [...who.slice(0, 8), `${who.length - 8} more`] : who;
    const other = event.other ? `branch ${windows.get(event.other) || "(never used)"}` : "";
    const what = [list.join(", "), event.op === "ask" ? event.query : "", event.note, other].filter(Boolean).join(" · ");
    const took = soft(event.seconds ? ` ${seconds(event.seconds)}` : "");
    return el("li", {}, el("b", {}, WORDS[event.op] || event.op), ` ${what}`, took);
  });
  return el("section", {}, el("h3", {}, "What happened"), el("ol", { className: "plain" }, ...items));
}

const EXACT = new Set(["computed", "formed", "resident"]);

function placedTable(model, step) {
  const row = (p, place) => {
    const chunk = model.chunks.get(p.chunk);
    const { name, kind } = describe(chunk);
    const clean = p.conditioned === false ? "clean of its context" : "";
    const state = [kind, PASSED[p.passed] || (MARKS[p.mark] || ["", ""])[1], p.pinned ? "pinned" : "", clean].filter(Boolean).join(", ");
    const lane = p.mark === "left" ? "left" : p.lane || "not asked";
    const trust = !p.lane ? "" : p.depth ? `approximate, depth ${p.depth}` : EXACT.has(p.lane) ? "exact" : "approximate";
    const tr = el(
      "tr", { "data-p": p.id, className: p.mark || "" },
      el("td", {}, place),
      el("td", {}, picture(chunk)),
      el("td", { className: "who" }, name, soft(state)),
      el("td", { className: "which" }, swatch(p.lane || "none"), lane, soft(trust)),
      el("td", { className: "number" }, count(p.tokens)),
    );
    return tr;
  };
  const head = ["", "", "chunk", "lane", "tokens"].map((name) => el(name ? "th" : "td", name ? { scope: "col" } : {}, name));
  const body = [...step.tiles.map((p, i) => row(p, String(i + 1))), ...step.left.map((p) => row({ ...p, mark: "left" }, "×"))];
  return el("section", { className: "wide" }, el("h3", {}, "In the window, in prompt order"),
    el("div", { className: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body))));
}
