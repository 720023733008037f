// Search in a site that is opened from disk. Browsers start no Worker from a file:// address, so there the script of the
// search runs in a hidden frame of the page instead. Served over http, nothing changes.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.answer = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      // To the script, postMessage is the way to the page; a frame's own would send to itself.
      frame.srcdoc = `<script>postMessage = (data) => frameElement.answer(data)</script><script src="${url}"></script>`
      this.ready = new Promise((loaded) => (frame.onload = () => loaded(frame.contentWindow)))
      document.body.append(frame)
    }

    postMessage(data) {
      this.ready.then((script) => script.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
