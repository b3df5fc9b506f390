// Submitting a job: a task, images, which of them to ask about; the price beside the button, progress, and nothing asked twice.

import { byId, el, fill, setText } from "./dom.js";
import { clearErrors, forgive, showProblem } from "./form_errors.js";
import { progress } from "./meters.js";
import { PriceBox } from "./price.js";
import { count, priceWords, whole } from "./words.js";

const IDS = { task_id: "job-task", name: "job-name", count: "job-count", strategy: "job-strategy", selection: "job-count", images: "job-files", archive: "job-files", parquet: "job-files" };
const QUESTIONS = 20;
const LARGE = { ".zip": "archive", ".parquet": "parquet" };

export class NewJob {
  #api;
  #box;
  #onSubmitted;
  #tasks = [];
  #key = newKey();
  #bar = progress("Sent");
  #isSending = false;
  /** Whether the number of questions is still the form's own: then it is one that can be sent. */
  #isOurs = true;

  /** `onSubmitted(job)` hears of a job that was taken. */
  constructor(api, budget, onFailure, onSubmitted) {
    this.#api = api;
    this.#onSubmitted = onSubmitted;
    this.#box = new PriceBox(api, budget, byId("job-price"), onFailure, (view) => this.#fit(view));
    byId("job-sent").append(this.#bar.node);
    const form = byId("job-form");
    form.addEventListener("input", (event) => {
      forgive(event.target);
      setText(byId("job-error"), "");
      if (event.target === byId("job-count")) this.#isOurs = false;
      // Another request: what is sent from now on is another job. Whatever else moves on the page keeps the key.
      this.#key = newKey();
      this.#update();
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      void this.#submit();
    });
  }

  again() {
    this.#box.again();
  }

  showTasks(known) {
    const tasks = known.filter((task) => task.task.method !== "evaluate"); // asks about a model, not about images
    const isSame = JSON.stringify(tasks) === JSON.stringify(this.#tasks);
    this.#tasks = tasks;
    byId("job-form").hidden = tasks.length === 0;
    byId("job-no-task").hidden = tasks.length > 0;
    if (isSame || tasks.length === 0) return;
    const before = byId("job-task").value;
    const chosen = tasks.some((task) => task.task_id === before) ? before : (tasks.find((task) => task.queries_left > 0) ?? tasks[0]).task_id;
    fill(byId("job-task"), JSON.stringify(tasks.map((task) => task.task_id)), () => tasks.map((task) => el("option", { value: task.task_id }, `${task.task.name ?? "task"} · ${task.task_id.slice(0, 8)}`)));
    byId("job-task").value = chosen;
    this.#update();
  }

  /** Another task, because somebody has just made it. */
  choose(taskId) {
    byId("job-task").value = taskId;
    this.#key = newKey();
    this.#update();
  }

  get #task() {
    return this.#tasks.find((task) => task.task_id === byId("job-task").value) ?? null;
  }

  get #files() {
    return [...byId("job-files").files];
  }

  /** One zip or one Parquet file holds many images; else every file is one. */
  get #container() {
    const files = this.#files;
    const ending = files.length === 1 ? Object.keys(LARGE).find((one) => files[0].name.toLowerCase().endsWith(one)) : undefined;
    return ending ? LARGE[ending] : null;
  }

  #update() {
    const task = this.#task;
    if (!task) return;
    const isWhole = task.task.method === "reverse-knn";
    const strategy = byId("job-strategy");
    byId("job-count").parentElement.hidden = strategy.value === "all";
    byId("job-count").max = String(task.queries_left);
    if (this.#isOurs) {
      const files = this.#container || this.#files.length === 0 ? Infinity : this.#files.length;
      byId("job-count").value = String(Math.max(1, Math.min(QUESTIONS, task.queries_left, files)));
    }
    setText(byId("job-task-words"), taskWords(task, isWhole));
    const [queries, words] = this.#queries(task);
    if (task.queries_left === 0) this.#box.ask(null, "All questions of this task have been asked. Make a new task; its noise is drawn anew.");
    else if (!(queries >= 1)) this.#box.ask(null, words);
    else this.#box.ask({ task_id: task.task_id, queries });
    setText(byId("job-count-words"), words);
  }

  /** A number that nobody has typed is lowered to what the budgets cover. */
  #fit(view) {
    if (!this.#isOurs || view.affordable || !view.queries_that_fit || byId("job-strategy").value === "all") return;
    byId("job-count").value = String(view.queries_that_fit);
    this.#box.ask({ task_id: this.#task.task_id, queries: view.queries_that_fit });
  }

  /** How many questions would be asked, and what to say about the number. */
  #queries(task) {
    if (byId("job-strategy").value !== "all") {
      const wanted = Number(byId("job-count").value);
      if (!(wanted >= 1)) return [0, "Say how many questions to ask; the price appears here."];
      if (wanted > task.queries_left) return [0, `This task has only ${count(task.queries_left, "question")} left.`];
      return [wanted, ""];
    }
    if (this.#container) return [task.queries_left, "The file is opened by the service, so this is the price of all questions that are left: at most that is charged."];
    if (this.#files.length === 0) return [0, "Choose images, or a number of questions; the price appears here. Asking for it is free."];
    if (this.#files.length > task.queries_left) return [0, `These are ${count(this.#files.length, "image")}, and the task has ${count(task.queries_left, "question")} left. Ask about some of them, or make a larger task.`];
    return [this.#files.length, ""];
  }

  async #submit() {
    if (this.#isSending) return;
    const form = byId("job-form");
    clearErrors(form);
    setText(byId("job-error"), "");
    if (this.#files.length === 0) {
      showProblem(form, byId("job-error"), { message: "", body: { fields: [{ field: "images", message: "choose images, a zip of images, or a Parquet file" }] } }, (name) => IDS[name] ?? "");
      return;
    }
    this.#sending(true);
    try {
      const job = await this.#api.submit(this.#body(), this.#key, (sent, total) => {
        this.#bar.update(sent, total);
        setText(byId("job-sent-words"), sent < total ? `${Math.floor((100 * sent) / total)} % sent` : "All is sent; the service looks at it.");
      });
      this.#key = newKey();
      byId("job-files").value = "";
      byId("job-name").value = "";
      this.#isOurs = true;
      this.#update();
      this.#onSubmitted(job);
    } catch (error) {
      const again = error.status ? "" : " Submit it again: if it had arrived, it is the same job, and nothing is charged twice.";
      showProblem(form, byId("job-error"), { message: `${error.message}${again}`, body: error.body }, (name) => IDS[name] ?? "");
    } finally {
      this.#sending(false);
    }
  }

  #sending(isSending) {
    this.#isSending = isSending;
    byId("job-submit").disabled = isSending;
    byId("job-sent").hidden = !isSending;
    setText(byId("job-sent-words"), isSending ? "Sending ..." : "");
    this.#bar.update(0, 1);
  }

  #body() {
    const strategy = byId("job-strategy").value;
    const selection = strategy === "all" ? { strategy } : { strategy, count: Number(byId("job-count").value) };
    const request = JSON.stringify({ task_id: byId("job-task").value, name: byId("job-name").value.trim(), selection });
    return formOf(request, this.#container ?? "images", this.#files);
  }
}

function taskWords(task, isWhole) {
  const inside = task.task;
  const opened = inside.release === "winner" ? "only the winning class is opened" : "the noisy sum of votes is opened";
  const classes = inside.num_classes ?? inside.classes?.length;
  return `${count(task.participants.length, "agent")}; ${classes ? `${count(classes, "class", "classes")}; ` : ""}${opened}; ${whole(task.queries_left)} questions left${isWhole ? ", asked all at once" : ""}. All of them together: ${priceWords(task.price)}.`;
}

/**
 * The form, with every name as it is: a browser's own writes a quote as %22, which a name may hold itself (api/form_parts.py).
 * The request comes first: the service reads a form in the order in which it is sent.
 */
function formOf(request, field, files) {
  const boundary = `labeler-${newKey()}`;
  const head = (name, more) => `--${boundary}\r\nContent-Disposition: form-data; name="${name}"${more}\r\n\r\n`;
  const quoted = (name) => name.replace(/[\\"]/g, "\\$&").replace(/[\r\n]/g, "_");
  const parts = files.flatMap((file) => [head(field, `; filename="${quoted(file.name)}"`), file, "\r\n"]);
  return new Blob([head("request", ""), request, "\r\n", ...parts, `--${boundary}--\r\n`], { type: `multipart/form-data; boundary=${boundary}` });
}

function newKey() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
