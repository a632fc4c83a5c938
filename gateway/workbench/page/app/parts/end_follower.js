// Whether the reader of a box that grows follows its end.

/** Follows until the reader scrolls up, and again from the end on. What comes between a scroll and its event moves the end
 * away, so that the distance to it alone says nothing: only the reader moves up. */
export class EndFollower {
  /** @param {number} pixels from where on it counts as the end */
  constructor(pixels) {
    this.pixels = pixels;
    this.follows = true;
    this.top = 0;
  }

  /** Takes note of where a box is scrolled to. @param {HTMLElement} element */
  scrolled(element) {
    const { scrollTop, scrollHeight, clientHeight } = element;
    if (scrollHeight - scrollTop - clientHeight < this.pixels) this.follows = true;
    else if (scrollTop < this.top - 1) this.follows = false;
    this.top = scrollTop;
    return this.follows;
  }

  /** Scrolls to the end, if the reader follows it. @param {HTMLElement} element */
  grown(element) {
    if (this.follows) element.scrollTop = element.scrollHeight;
    return this.scrolled(element);
  }
}
