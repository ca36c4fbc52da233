// A ring of the latest samples of a figure, for sparklines. A missing one is NaN.

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

  // fill puts samples that end now where there are none: before the first one, as
  // far as there is room, and into gaps.
  fill(samples) {
    const have = this.values();
    const length = Math.min(Math.max(have.length, samples.length), this.#samples.length);
    const at = (list, i) => (i + list.length < length ? NaN : list[i + list.length - length]);
    const all = Array.from({ length }, (_, i) => {
      const mine = at(have, i);
      return Number.isNaN(mine) ? at(samples, i) : mine;
    });
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
