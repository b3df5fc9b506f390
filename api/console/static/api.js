// The REST interface as this page uses it: JSON with a bearer token, server-sent events, downloads.

const TOKEN_KEY = "labeler.token";
const TIMEOUT_MS = 20_000;
export const PAGE = 100;

/** The service answered, and said no (RFC 9457). */
export class Problem extends Error {
  constructor(status, body) {
    super(body.detail || body.title || `the service answered ${status}`);
    this.status = status;
    this.body = body;
    this.retryAfterS = 0;
  }
}

/** No answer came. */
export class Unreachable extends Error {}

export class Api {
  #token = "";

  constructor() {
    this.#token = sessionStorage.getItem(TOKEN_KEY) ?? "";
  }

  get hasToken() {
    return this.#token !== "";
  }

  signIn(token) {
    this.#token = token;
    sessionStorage.setItem(TOKEN_KEY, token);
  }

  signOut() {
    this.#token = "";
    sessionStorage.removeItem(TOKEN_KEY);
  }

  async #ask(path, { method = "GET", body = null, headers = {}, signal, withToken = true } = {}) {
    const token = this.#token;
    const sent = { Accept: "application/json", ...headers };
    if (withToken && token) sent.Authorization = `Bearer ${token}`;
    if (body !== null) sent["Content-Type"] = "application/json";
    try {
      return await fetch(path, {
        method,
        headers: sent,
        body: body === null ? undefined : JSON.stringify(body),
        signal,
        cache: "no-store",
        credentials: "omit",
        redirect: "error",
        referrerPolicy: "no-referrer",
      });
    } catch (error) {
      if (signal?.aborted && signal.reason?.name !== "TimeoutError") throw signal.reason;
      throw new Unreachable("the service does not answer", { cause: error });
    }
  }

  async #refuse(response) {
    let body = {};
    try {
      body = await response.json();
    } catch {
      // a proxy may answer in HTML; the status has to do
    }
    const problem = new Problem(response.status, typeof body === "object" && body !== null ? body : {});
    problem.retryAfterS = Number(response.headers.get("Retry-After")) || 0;
    throw problem;
  }

  async #json(path, options = {}) {
    const limit = AbortSignal.timeout(TIMEOUT_MS);
    const signal = options.signal ? AbortSignal.any([options.signal, limit]) : limit;
    const response = await this.#ask(path, { ...options, signal });
    if (!response.ok) await this.#refuse(response);
    try {
      return await response.json();
    } catch (error) {
      if (options.signal?.aborted) throw options.signal.reason;
      throw new Unreachable("the answer broke off", { cause: error });
    }
  }

  /** Whether jobs can be taken, and to an administrator why not; answered with 503 while they cannot, as good an answer. */
  async readiness() {
    const response = await this.#ask("/readyz", { withToken: this.hasToken, signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (response.status === 401) await this.#refuse(response);
    try {
      const view = await response.json();
      if (Array.isArray(view.checks)) return view;
    } catch {
      // falls through
    }
    throw new Unreachable(`the service answered ${response.status} without saying why`);
  }

  whoami = () => this.#json("/v1/whoami");
  budget = () => this.#json("/v1/budget");
  queryBudgets = ({ job = "", after = null } = {}) => this.#json(`/v1/budget/queries?${query({ job_id: job || null, after, limit: PAGE })}`);
  parties = () => this.#json("/v1/parties");
  tokens = (after = null) => this.#json(`/v1/tokens?${query({ after, limit: PAGE })}`);
  makeToken = (name, role) => this.#json("/v1/tokens", { method: "POST", body: { name, role } });
  revokeToken = (id) => this.#json(`/v1/tokens/${encodeURIComponent(id)}`, { method: "DELETE" });
  makeTask = (body) => this.#json("/v1/tasks", { method: "POST", body });
  tasks = (after = null) => this.#json(`/v1/tasks?${query({ after, limit: PAGE })}`);
  task = (id) => this.#json(`/v1/tasks/${encodeURIComponent(id)}`);
  job = (id) => this.#json(`/v1/jobs/${encodeURIComponent(id)}`);
  cancel = (id) => this.#json(`/v1/jobs/${encodeURIComponent(id)}`, { method: "DELETE" });
  forget = (id) => this.#json(`/v1/jobs/${encodeURIComponent(id)}/data`, { method: "DELETE" });
  jobs = ({ after = null, limit = 25, states = [] } = {}) => this.#json(`/v1/jobs?${query({ after, limit, state: states })}`);
  estimate = (body, signal) => this.#json("/v1/jobs:estimate", { method: "POST", body, signal });
  ledger = ({ after = 0, limit = PAGE, account = "", search = "" } = {}, signal = undefined) =>
    this.#json(`/v1/ledger?${query({ after, limit, account, search })}`, { signal });

  /** Small pictures of a job's own images. */
  thumbnails = (id, sources) => this.#json(`/v1/jobs/${encodeURIComponent(id)}:thumbnails`, { method: "POST", body: { sources } });

  /** A job's labels as objects: of every image. */
  async labelRows(id) {
    const { data } = await this.file(id, "labels", { format: "jsonl" });
    const lines = (await data.text()).split("\n").filter((line) => line !== "");
    return lines.map((line) => JSON.parse(line));
  }

  /**
   * Submits a job with files. `key` names this very submission, so that sending it again is never a second job.
   * XMLHttpRequest because only it tells how much has been sent.
   */
  submit(form, key, onProgress) {
    return new Promise((resolve, reject) => {
      const request = new XMLHttpRequest();
      request.open("POST", "/v1/jobs");
      request.responseType = "text";
      request.setRequestHeader("Accept", "application/json");
      request.setRequestHeader("Authorization", `Bearer ${this.#token}`);
      request.setRequestHeader("Idempotency-Key", key);
      request.upload.addEventListener("progress", (event) => event.lengthComputable && onProgress(event.loaded, event.total));
      request.addEventListener("error", () => reject(new Unreachable("the service does not answer")));
      request.addEventListener("load", () => {
        let body = {};
        try {
          body = JSON.parse(request.responseText);
        } catch {
          // a proxy may answer in HTML; the status has to do
        }
        if (request.status >= 200 && request.status < 300 && body?.job_id) resolve(body);
        else reject(new Problem(request.status, typeof body === "object" && body !== null ? body : {}));
      });
      request.send(form);
    });
  }

  /** What a job found, as bytes under the name that the service gives them: `labels`, its `student` or its `evaluation`. */
  file = (id, what, wanted = {}) => this.#file(`/v1/jobs/${encodeURIComponent(id)}/${what}?${query(wanted)}`, `${id}-${what}.json`);

  /** What a job found that evaluates a model, as it is shown. */
  evaluation = async (id) => JSON.parse(await (await this.file(id, "evaluation")).data.text());

  /** Signed evidence of a task or a period: as a file to check, or a page to print. */
  evidence = async (wanted) => (await this.#file(`/v1/evidence?${query(wanted)}`)).data;

  async #file(path, otherwise = "") {
    const response = await this.#ask(path, { headers: { Accept: "*/*" } });
    if (!response.ok) await this.#refuse(response);
    const name = /filename="([^"]+)"/.exec(response.headers.get("Content-Disposition") ?? "")?.[1] ?? otherwise;
    return { data: await response.blob(), name };
  }

  /**
   * A job's progress as it happens: calls `onJob` with each view until the job is finished or `signal` aborts.
   * EventSource cannot send the token, so the stream is read and split here.
   */
  async watch(id, onJob, signal) {
    const path = `/v1/jobs/${encodeURIComponent(id)}/events`;
    const response = await this.#ask(path, { headers: { Accept: "text/event-stream" }, signal });
    if (!response.ok) await this.#refuse(response);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    try {
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        rest += value;
        const blocks = rest.split(/\r\n\r\n|\n\n|\r\r/);
        rest = blocks.pop();
        for (const block of blocks) {
          const job = parseEvent(block);
          if (job?.job_id) onJob(job);
        }
      }
    } catch (error) {
      if (signal.aborted) return;
      throw new Unreachable("the stream broke off", { cause: error });
    }
  }
}

/** The JSON of one event's data lines; null for comments and anything else. */
export function parseEvent(block) {
  const data = block
    .split(/\r\n|\n|\r/)
    .filter((line) => line.startsWith("data:"))
    .map((line) => line.slice(5).replace(/^ /, ""));
  if (data.length === 0) return null;
  try {
    return JSON.parse(data.join("\n"));
  } catch {
    return null;
  }
}

function query(values) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    if (value === null || value === "" || value === undefined) continue;
    for (const one of [value].flat()) parameters.append(name, String(one));
  }
  return parameters.toString();
}
