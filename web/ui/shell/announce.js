// What a screen reader announces by itself: moves between data planes,
// endpoints that go down, and the stream's state; never more often than every few
// seconds, and in one sentence however much happened.

import { byId } from "../lib/dom.js";

const every = 5_000;

export class Announcer {
  #region = byId("live-region");
  #waiting = [];
  #timer = 0;

  say(text) {
    this.#waiting.push(text);
    this.#timer ||= setTimeout(() => this.#speak(), 400);
  }

  #speak() {
    const last = this.#waiting.at(-1);
    const others = this.#waiting.length - 1;
    this.#waiting = [];
    this.#region.textContent = others > 0 ? `${others + 1} changes. The latest: ${last}` : last;
    this.#timer = setTimeout(() => {
      this.#timer = 0;
      if (this.#waiting.length > 0) this.#speak();
    }, every);
  }
}
