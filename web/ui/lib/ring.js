// A ring of the latest samples of a figure, for sparklines.

export class Ring {
  #samples;
  #next = 0;
  #length = 0;

  constructor(capacity) {
    this.#samples = new Float32Array(capacity);
  }

  get length() {
    return this.#length;
  }

  push(sample) {
    this.#samples[this.#next] = sample;
    this.#next = (this.#next + 1) % this.#samples.length;
    this.#length = Math.min(this.#length + 1, this.#samples.length);
  }

  // prepend puts older samples before those that are there, as far as there is room.
  prepend(older) {
    const all = [...older, ...this.values()].slice(-this.#samples.length);
    this.#next = 0;
    this.#length = 0;
    for (const s of all) this.push(s);
  }

  // values returns the samples, oldest first.
  values() {
    const out = new Array(this.#length);
    const capacity = this.#samples.length;
    const start = (this.#next - this.#length + capacity) % capacity;
    for (let i = 0; i < this.#length; i++) out[i] = this.#samples[(start + i) % capacity];
    return out;
  }
}
