// Browsers start no workers for pages opened as files. There, run the script of the site's search
// in a hidden frame. The search looks for the name IFrameWorker.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(script) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.answer = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.frame.srcdoc =
        "<script>const frame = frameElement; window.postMessage = (data) => frame.answer(data)</script>" +
        `<script src="${script}"></script>`;
      this.frame.onload = () => {
        const early = this.waiting;
        this.waiting = null;
        early.forEach((data) => this.postMessage(data));
      };
      document.body.append(this.frame);
    }

    postMessage(data) {
      if (this.waiting) {
        this.waiting.push(data);
      } else {
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
      }
    }
  };
  window.Worker = window.IFrameWorker;
}
