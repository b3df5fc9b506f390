// Numbers and moments as people read them.

/** An epsilon with three digits, rounded up so that the bound holds; null has no bound. */
export function epsilon(value) {
  if (value === null || value === undefined) return "no bound";
  const near = Number(value.toPrecision(3));
  if (near >= value) return near.toString();
  return Number((value + 10 ** (Math.floor(Math.log10(value)) - 2) / 2).toPrecision(3)).toString();
}

/** A tiny number such as delta. */
export function small(value) {
  return Number(value).toExponential(2).replace(/\.?0+e/, "e");
}

export function many(count, one, more) {
  return `${count.toLocaleString("en")} ${count === 1 ? one : more}`;
}

/** A moment in the reader's own time, which it names. */
export function moment(text) {
  const at = new Date(text);
  if (!text || Number.isNaN(at.getTime())) return "";
  return at.toLocaleString("en-GB", { day: "numeric", month: "short", year: "numeric", hour: "2-digit", minute: "2-digit", timeZoneName: "short" });
}

/** A few names of many. */
export function names(list, most = 12) {
  const shown = list.slice(0, most).join(", ");
  return list.length > most ? `${shown} and ${many(list.length - most, "more", "more")}` : shown;
}

const METHODS = {
  knn: "nearest neighbours vote",
  "reverse-knn": "each record votes once, for the nearest question",
  ensemble: "a model trained here votes",
  "blind-average": "a noisy linear model leaves",
  federated: "noisy steps of training a linear model leave",
  "aux-distill": "noisy soft labels leave",
};

export function method(name) {
  return METHODS[name] ? `${name}: ${METHODS[name]}` : name || "not kept";
}
