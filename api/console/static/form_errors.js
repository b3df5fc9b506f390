// What a form was refused for, beside the field it is about; nothing that was typed is lost.

import { byId, el, setText } from "./dom.js";
import { sentence } from "./words.js";

/** Takes away what was said before. */
export function clearErrors(form) {
  for (const field of form.querySelectorAll("[aria-invalid]")) forgive(field);
}

/** What was said of a field ends when it is changed: whether it is right now, the service says when it is asked again. */
export function forgive(field) {
  if (!field.hasAttribute?.("aria-invalid")) return;
  byId(`${field.id}-error`)?.remove();
  field.removeAttribute("aria-invalid");
  field.removeAttribute("aria-describedby");
}

/**
 * Says why a request was refused: at the fields that a 422 names, else beside the button.
 *
 * `idOf(name)` is the id of the control of a field of the request, such as "k" or "lifetime_budget.epsilon", or "".
 */
export function showProblem(form, place, error, idOf) {
  clearErrors(form);
  const fields = Array.isArray(error.body?.fields) ? error.body.fields : [];
  const placed = fields.filter((one) => say(fieldOf(one.field, idOf), one.message));
  const rest = fields.length > 0 && placed.length === fields.length;
  setText(place, rest ? "Something above has to be corrected. Nothing you typed is lost." : sentence(error.message));
  (form.querySelector("[aria-invalid]") ?? place).focus();
}

/** "body.k" and "body.task.k" are about k; "body.lifetime_budget.epsilon" is about that, else about lifetime_budget. */
function fieldOf(path, idOf) {
  const parts = String(path).split(".").filter((part) => !/^(body|task|request|\d+)$/.test(part));
  for (let many = parts.length; many > 0; many -= 1) {
    const field = byId(idOf(parts.slice(0, many).join(".")) || "none");
    if (field && !field.parentElement.hidden) return field;
  }
  return null;
}

function say(field, message) {
  if (!field) return false;
  const id = `${field.id}-error`;
  field.setAttribute("aria-invalid", "true");
  field.setAttribute("aria-describedby", id);
  if (!byId(id)) field.closest("p").append(el("span", { class: "error field-error block", id }, sentence(message)));
  return true;
}
