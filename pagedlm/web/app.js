// The live view: a chat, and what the engine does meanwhile. Text is only ever set as text; nothing comes from another host.
"use strict";
const $ = id => document.getElementById(id);
const css = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const COLUMNS = 48, ROWS = 14;

let key = sessionStorage.getItem("key") || "";
const headers = () => ({"Content-Type": "application/json", ...(key ? {Authorization: "Bearer " + key} : {})});

// ---- server-sent events over fetch: the browser's own EventSource cannot send a key

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  try {
    for (;;) {
      const {value, done} = await reader.read();
      if (done) return;
      const parts = (left + value).split("\n\n");
      left = parts.pop();
      for (const part of parts) {
        const event = {name: "", data: ""};
        for (const line of part.split("\n")) {
          if (line.startsWith("event: ")) event.name = line.slice(7);
          if (line.startsWith("data: ")) event.data += line.slice(6);
        }
        yield event;
      }
    }
  } finally { reader.cancel().catch(() => {}); }
}

function askForKey(response) {
  if (response.status === 401) { $("key-form").hidden = false; $("key").focus(); }
  return response.status === 401;
}

// ---- what the engine does: a copy of its state, kept up to date by its events

const engine = {
  sizes: null, requests: new Map(), tables: new Map(), readers: new Map(), named: new Set(), steps: [], colors: 0, mine: new Set(),

  reset(s) {
    this.sizes = s;
    this.requests = new Map(Object.entries(s.requests).map(([id, r]) => [id, this.request(r)]));
    this.tables = new Map(Object.entries(s.tables));
    this.named = new Set(s.named);
    this.readers = new Map();
    for (const blocks of this.tables.values()) this.hold(blocks, 1);
    this.steps = [];
  },
  request(r) { return {...r, known: r.n_prompt + r.n_output, color: "r" + this.colors++ % 8, ended: ""}; },
  hold(blocks, by) {
    for (const b of blocks) {
      const n = (this.readers.get(b) || 0) + by;
      n > 0 ? this.readers.set(b, n) : this.readers.delete(b);
    }
  },
  take(t, name, f) {
    const r = this.requests.get(f.request);
    if (name === "arrive") this.requests.set(f.request, this.request({n_prompt: f.n_prompt, n_output: 0, n_computed: 0, running: false}));
    else if (name === "admit" && r) { r.running = true; r.n_computed = f.n_cached; r.cached = f.n_cached; }
    else if (name === "token" && r) { r.n_output = f.n_output; r.known = r.n_prompt + f.n_output; }
    else if (name === "preempt" && r) { r.running = false; r.n_computed = 0; this.note(f.request, "lost"); }
    else if (name === "finish" || name === "abort") this.end(f.request, f.reason || "abort");
    else if (name === "take" || name === "share") {
      if (!this.tables.has(f.request)) this.tables.set(f.request, []);
      this.tables.get(f.request).push(...f.blocks);
      this.hold(f.blocks, 1);
    } else if (name === "free") {
      this.hold(f.blocks, -1);
      const left = (this.tables.get(f.request) || []).filter(b => !f.blocks.includes(b));
      left.length ? this.tables.set(f.request, left) : this.tables.delete(f.request);
    } else if (name === "name") this.named.add(f.block);
    else if (name === "evict") this.named.delete(f.block);
    else if (name === "step") this.step(t, f);
  },
  step(t, f) {
    const cells = new Map();
    for (const [id, n] of f.works) {
      const r = this.requests.get(id);
      const decode = n === 1 && r && r.n_computed >= r.n_prompt;
      cells.set(id, {n, kind: decode ? "output" : "input", cached: r && r.cached || 0});
      if (r) { r.n_computed += n; r.cached = 0; }
    }
    this.steps.push({start: f.start, end: t, cells, n: f.works.reduce((sum, [, n]) => sum + n, 0)});
    if (this.steps.length > 400) this.steps.splice(0, 100);
  },
  note(id, kind) {
    const last = this.steps.at(-1);
    if (last) last.cells.set(id, {n: "×", kind: "alert"});
  },
  end(id, reason) {
    const r = this.requests.get(id);
    if (!r) return;
    r.running = false;
    r.ended = reason;
    r.gone = this.steps.length ? this.steps.at(-1).end : 0;
    if (this.requests.size > 200) for (const [old, x] of this.requests) if (x.ended && this.requests.size > 100) this.requests.delete(old);
  },
};

async function watch() {
  for (let wait = 500; ; wait = Math.min(2 * wait, 8000)) {
    try {
      const response = await fetch("/events", {headers: headers(), cache: "no-store"});
      if (askForKey(response)) { $("link").textContent = "waiting for a key"; return; }
      if (!response.ok) throw new Error(response.status);
      $("link").textContent = "connected";
      $("link").className = "";
      for await (const event of events(response)) {
        const data = JSON.parse(event.data);
        if (event.name === "snapshot") engine.reset(data);
        else for (const [t, name, fields] of data) engine.take(t, name, fields);
        wait = 500;
        draw();
      }
    } catch { /* the server is gone, or was never there */ }
    $("link").textContent = "no connection: trying again";
    $("link").className = "off";
    await new Promise(done => setTimeout(done, wait));
  }
}

// ---- drawing, once per frame at most

let drawing = false;
function draw() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => { drawing = false; numbers(); drawSteps(); drawBlocks(); });
}

function paper(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.height = height + "px";
  const c = canvas.getContext("2d");
  c.scale(scale, scale);
  c.textBaseline = "middle";
  return c;
}

function numbers() {
  const live = [...engine.requests.values()].filter(r => !r.ended), recent = engine.steps.slice(-40);
  $("running").textContent = live.filter(r => r.running).length;
  $("waiting").textContent = live.filter(r => !r.running).length;
  const seconds = recent.reduce((sum, s) => sum + s.end - s.start, 0), n = recent.reduce((sum, s) => sum + s.n, 0);
  $("rate").textContent = seconds ? Math.round(n / seconds) : "–";
  $("step-ms").textContent = recent.length ? (1000 * seconds / recent.length).toFixed(1) : "–";
  $("held").textContent = engine.sizes ? `${engine.readers.size} of ${engine.sizes.n_blocks - 1}` : "–";
}

function drawSteps() {
  const room = $("steps").parentElement.clientWidth, left = 74, cell = Math.max(13, (room - left - 8) / COLUMNS);
  const n = Math.floor((room - left - 8) / cell), steps = engine.steps.slice(-n);
  const ids = [...new Set(steps.flatMap(s => [...s.cells.keys()]))];
  for (const [id, r] of engine.requests) if (!r.ended && !r.running && !ids.includes(id)) ids.push(id);
  const shown = ids.filter(id => engine.mine.has(id)).concat(ids.filter(id => !engine.mine.has(id)).slice(-ROWS)).slice(0, ROWS);
  const c = paper($("steps"), room, 24 * Math.max(4, shown.length) + 24), ink = css("ink"), muted = css("muted");
  c.font = "11px system-ui, sans-serif";
  shown.forEach((id, row) => {
    const y = 24 * row + 12, r = engine.requests.get(id);
    c.fillStyle = r ? css(r.color) : muted;
    c.fillRect(4, y - 7, 6, 14);
    c.fillStyle = ink;
    c.fillText((engine.mine.has(id) ? "yours " : "") + id, 16, y, left - 20);
    let last = -1;
    steps.forEach((s, i) => {
      const what = s.cells.get(id), x = left + i * cell;
      if (!what) return;
      last = i;
      c.globalAlpha = .25;
      c.fillStyle = css(what.kind);
      c.fillRect(x + .5, y - 10, cell - 1, 20);
      c.globalAlpha = 1;
      c.fillStyle = ink;
      c.textAlign = "center";
      c.fillText(what.n, x + cell / 2, y, cell - 2);
      c.textAlign = "start";
    });
    c.fillStyle = muted;
    if (r && r.ended && last < steps.length - 2) c.fillText(r.ended, left + (last + 1) * cell + 4, y);
    if (r && !r.ended && !r.running) c.fillText("waits", left + steps.length * cell - 30, y);
  });
  c.fillStyle = muted;
  if (!shown.length) c.fillText("Nothing has been asked yet.", left, 24);
  if (ids.length > shown.length) c.fillText(`and ${ids.length - shown.length} more`, 16, 24 * shown.length + 12);
}

let layout = null;
function drawBlocks() {
  if (!engine.sizes) return;
  const room = $("blocks").clientWidth, n = engine.sizes.n_blocks;
  const size = Math.max(5, Math.min(22, Math.floor(Math.sqrt(room * 260 / n)))), per = Math.max(1, Math.floor(room / size));
  const c = paper($("blocks"), room, Math.ceil(n / per) * size + 2), owners = new Map();
  layout = {size, per, n};
  for (const [id, blocks] of engine.tables) for (const b of blocks) owners.set(b, id);
  const free = css("free"), shared = css("state");
  for (let b = 0; b < n; b++) {
    const x = b % per * size, y = Math.floor(b / per) * size, w = size - 1, owner = owners.get(b), r = engine.requests.get(owner);
    const color = engine.readers.get(b) > 1 ? shared : r ? css(r.color) : free;
    c.globalAlpha = owner === undefined ? (engine.named.has(b) ? .45 : .15) : .85;
    c.fillStyle = c.strokeStyle = color;
    c.fillRect(x, y, w, w);
    c.globalAlpha = 1;
    if (engine.readers.get(b) > 1 || engine.named.has(b) && owner === undefined) { // hatched: somebody may read it, too
      c.beginPath();
      c.moveTo(x, y + w);
      c.lineTo(x + w, y);
      c.strokeStyle = owner === undefined ? free : css("paper");
      c.stroke();
    }
  }
  $("legend").textContent = `${n - 1} blocks of ${engine.sizes.block_size} tokens. In colour: held by a request; hatched: more than one reader; ` +
    "grey: free, and hatched if the next prompt that begins alike may use its content.";
}

$("blocks").addEventListener("pointermove", e => {
  if (!layout) return;
  const box = $("blocks").getBoundingClientRect();
  const b = Math.floor((e.clientY - box.top) / layout.size) * layout.per + Math.floor((e.clientX - box.left) / layout.size);
  if (b < 0 || b >= layout.n) return;
  const who = [...engine.tables].filter(([, blocks]) => blocks.includes(b)).map(([id]) => id);
  $("at-block").textContent = `block ${b}: ` + (b === 0 ? "the null block, never handed out" : who.length ? "request " + who.join(" and ") :
    engine.named.has(b) ? "free, content kept" : "free");
});
window.addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

// ---- the chat: its messages are in this page only

let messages = [], busy = null;

function say(kind, text) {
  const article = document.createElement("article");
  article.className = kind;
  article.textContent = text;
  $("said").append(article);
  $("said").scrollTop = $("said").scrollHeight;
  return article;
}

function told(article, text) {
  const small = document.createElement("small");
  small.textContent = text;
  article.append(small);
}

async function ask(text) {
  messages.push({role: "user", content: text});
  say("user", text);
  const article = say("assistant", ""), start = performance.now();
  let answer = "", n = 0, first = 0;
  busy = new AbortController();
  $("send").hidden = !($("stop").hidden = false);
  try {
    const body = JSON.stringify({messages, temperature: 0.6, top_p: 0.9, stream: true, stream_options: {include_usage: true}});
    const response = await fetch("/v1/chat/completions", {method: "POST", headers: headers(), body, signal: busy.signal});
    if (!response.ok) {
      askForKey(response);
      const later = response.headers.get("retry-after");
      throw new Error((await response.json()).error.message + (later ? ` (in ${later} s)` : ""));
    }
    engine.mine.add(response.headers.get("x-request-id"));
    const atEnd = () => $("said").scrollHeight - $("said").scrollTop - $("said").clientHeight < 40;
    for await (const event of events(response)) {
      if (event.data === "[DONE]") break;
      const data = JSON.parse(event.data);
      if (data.error) throw new Error(data.error.message);
      if (data.usage) n = data.usage.completion_tokens;
      const piece = data.choices[0]?.delta.content;
      if (!piece) continue;
      first ||= performance.now();
      const follow = atEnd();
      answer += piece;
      article.textContent = answer;
      if (follow) $("said").scrollTop = $("said").scrollHeight;
    }
    const seconds = (performance.now() - first) / 1000;
    told(article, `first token after ${Math.round(first - start)} ms; ${n} tokens, ${(Math.max(0, n - 1) / seconds).toFixed(1)} a second`);
  } catch (e) {
    if (e.name === "AbortError") told(article, "stopped");
    else { article.className = "error"; article.textContent = answer + (answer ? "\n" : "") + e.message; }
  }
  if (answer) messages.push({role: "assistant", content: answer});
  else messages.pop();
  busy = null;
  $("send").hidden = !($("stop").hidden = true);
}

$("ask").addEventListener("submit", e => {
  e.preventDefault();
  const text = $("text").value.trim();
  if (!text || busy) return;
  $("text").value = "";
  ask(text);
});
$("text").addEventListener("keydown", e => {
  if (e.key === "Enter" && !e.shiftKey && !e.isComposing) { e.preventDefault(); $("ask").requestSubmit(); }
});
$("stop").addEventListener("click", () => busy?.abort());
$("anew").addEventListener("click", () => { busy?.abort(); messages = []; $("said").replaceChildren(); $("text").focus(); });
$("key-form").addEventListener("submit", e => {
  e.preventDefault();
  key = $("key").value;
  sessionStorage.setItem("key", key);
  $("key-form").hidden = true;
  watch();
  name();
});

async function name() {
  const response = await fetch("/v1/models", {headers: headers()});
  if (response.ok) $("model").textContent = (await response.json()).data[0].id;
}

watch();
name();
draw();
