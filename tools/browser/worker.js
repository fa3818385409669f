// Python in a worker: Pyodide from this folder, nothing from elsewhere. Messages in: {id, what, ...}; out: {id, type, ...}
import { loadPyodide } from './PYODIDE/pyodide.mjs';

const base = new URL('./PYODIDE/', import.meta.url).href;
let current = 0; // the message that is worked on
const say = text => postMessage({type: 'status', text});
const send = (mime, data) => postMessage({id: current, type: 'out', mime, data});

async function start() {
  say('Loading Python: MEGABYTES MB, which the browser keeps …');
  // Ask for the large file first: where it is missing, Pyodide would wait for ever
  const [large, lock] = await Promise.all([fetch(base + 'pyodide.asm.wasm', {method: 'HEAD'}),
                                           fetch(base + 'pyodide-lock.json', {cache: 'no-cache'})]);
  if (!large.ok || !lock.ok) throw new Error('a file of the Python runtime is missing');
  const line = text => send('stream', text + '\n');
  const python = await loadPyodide({indexURL: base, packageBaseUrl: base, lockFileContents: await lock.text(),
                                    stdout: line, stderr: line});
  python.registerJsModule('page', {send});
  await python.loadPackage('pagedlm', {messageCallback() {}, errorCallback: say});
  python.runPython(await (await fetch(new URL('kernel.py', import.meta.url))).text());
  say('');
  return python;
}

const ready = start();
ready.catch(() => {}); // each message hears of it below
// A .wasm file that is refused leaves Pyodide's promise unsettled: only this event tells
addEventListener('unhandledrejection', e => postMessage({type: 'dead', text: e.reason?.message || String(e.reason)}));

const ways = {
  async run(python, {sources}) {
    const error = await python.globals.get('run')(python.toPy(sources));
    if (error) throw new Error(error);
  },
  async live(python, {figure, where, method, args}) {
    return python.globals.get('live')(figure, where, method, JSON.stringify(args));
  },
};
let queue = Promise.resolve(); // one after the other
onmessage = ({data: m}) => { queue = queue.then(async () => {
  let python;
  try { python = await ready; } catch (e) { return postMessage({type: 'dead', text: e.message || String(e)}); }
  try {
    current = m.id;
    postMessage({id: m.id, type: 'done', value: await ways[m.what](python, m)});
  } catch (e) { postMessage({id: m.id, type: 'error', text: e.message || String(e)}); }
}); };
