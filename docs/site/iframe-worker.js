// Browsers refuse workers in pages that are opened as files. The search runs in one, so
// such a page gets a worker that is a hidden frame. It does not run beside the page.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = "<!doctype html>"
      this.ready = new Promise((resolve) => {
        frame.onload = () => {
          frame.onload = null
          const inside = frame.contentWindow
          inside.postMessage = (data) => this.receive(data)
          const script = inside.document.createElement("script")
          script.src = new URL(url, location.href)
          script.onload = () => resolve(inside)
          inside.document.body.append(script)
        }
      })
      document.body.append(frame)
    }

    receive(data) {
      const event = new MessageEvent("message", { data })
      this.dispatchEvent(event)
      this.onmessage?.(event)
    }

    async postMessage(data) {
      const inside = await this.ready
      inside.dispatchEvent(new inside.MessageEvent("message", { data }))
    }
  }
}
