// The admin key: asked for when the router wants one, kept for this tab alone.

const KEY_NAME = "sglang-afd-admin-key";

function makeKey(onGiven) {
  const form = byId("key");
  const input = byId("key-value");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY_NAME, input.value.trim());
    input.value = "";
    onGiven();
  });
  byId("forget").addEventListener("click", () => {
    sessionStorage.removeItem(KEY_NAME);
    onGiven();
  });
  return {
    headers() {
      const key = sessionStorage.getItem(KEY_NAME);
      return key === null ? {} : { Authorization: `Bearer ${key}` };
    },
    /** Show the form; `detail` is the router's own word. */
    ask(detail) {
      const was = sessionStorage.getItem(KEY_NAME) !== null;
      sessionStorage.removeItem(KEY_NAME);
      const wrong = was ? "The router refused the key that you gave. " : "";
      setText(byId("key-why"), wrong + (detail || "The key is what --admin-api-key-file of the router holds."));
      const wasHidden = form.hidden;
      setHidden(form, false);
      setHidden(byId("forget"), true);
      if (wasHidden || was) input.focus();
    },
    accepted() {
      setHidden(byId("key"), true);
      setHidden(byId("forget"), sessionStorage.getItem(KEY_NAME) === null);
    },
  };
}
