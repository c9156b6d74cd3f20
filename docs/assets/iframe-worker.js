// Browsers do not start workers from file:// pages. There, the search runs in a hidden frame with a worker's interface.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.append(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = data => setTimeout(() => {  // later, as from a worker
        const said = new MessageEvent("message", { data: structuredClone(data) })
        this.onmessage?.(said)
        this.dispatchEvent(said)
      })
      this.inside.importScripts = (...urls) => Promise.all(urls.map(each => this.load(each)))
      this.load(url).then(() => {
        const waiting = this.waiting
        this.waiting = null
        waiting.forEach(data => this.postMessage(data))
      })
    }
    load(url) {
      return new Promise((done, failed) => {
        const script = this.inside.document.createElement("script")
        Object.assign(script, { src: url, onload: done, onerror: failed })
        this.inside.document.body.append(script)
      })
    }
    postMessage(data) {
      if (this.waiting) this.waiting.push(data)
      else this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data: this.inside.structuredClone(data) }))
    }
    terminate() {
      this.inside.frameElement.remove()
    }
  }
}
