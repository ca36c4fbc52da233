// Questions to kproxy. Everything is a GET and answered with JSON.

// RequestError says what went wrong, in words for people.
export class RequestError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status; // 0 if there was no answer
  }
}

// get fetches path with the parameters that are set; a list repeats its parameter.
export async function get(path, params = {}, signal) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    for (const v of Array.isArray(value) ? value : [value]) if (v !== "" && v !== undefined) query.append(name, v);
  }
  const text = query.toString();
  let response;
  try {
    response = await fetch(text === "" ? path : `${path}?${text}`, { signal, headers: { Accept: "application/json" } });
  } catch (e) {
    if (e.name === "AbortError") throw e;
    throw new RequestError("kproxy doesn’t answer", 0);
  }
  let body = null;
  try {
    body = await response.json();
  } catch (e) {
    if (e.name === "AbortError") throw e;
    if (response.ok) throw new RequestError(`kproxy’s answer to ${path} was cut off`, response.status);
  }
  if (!response.ok) throw new RequestError(body?.error || `kproxy answered with status ${response.status}`, response.status);
  return body;
}
