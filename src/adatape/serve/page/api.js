import { $ } from "./dom.js";

export async function ask(path, options = {}) {
  const token = sessionStorage.getItem("token");
  let reply;
  try {
    reply = await fetch(path, { ...options, headers: { ...options.headers, ...(token ? { authorization: `Bearer ${token}` } : {}) } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server did not answer. It may have stopped, or it cut off an upload that is too large.");
  }
  const body = await reply.json().catch(() => ({}));
  if (reply.status === 401) $("#token").hidden = false;
  if (!reply.ok) throw new Error(typeof body.detail === "string" ? body.detail : `The server answered ${reply.status}.`);
  return body;
}

/** Runs one request at a time; a newer one makes the older one's reply count for nothing. */
export class Latest {
  #turn = 0;
  #controller = null;

  cancel() {
    this.#turn++;
    this.#controller?.abort();
  }

  async run(work, done, failed) {
    this.cancel();
    const mine = this.#turn;
    this.#controller = new AbortController();
    try {
      const value = await work(this.#controller.signal);
      if (mine === this.#turn) done(value);
    } catch (error) {
      if (mine === this.#turn) failed(error);
    }
  }
}
