"""Open a page in Chromium without a window (Qt WebEngine), and print what it shows as JSON.

Run as a program of its own, since Chromium starts processes and an event loop:
`python -m tests.open_in_browser '{"url": …, "width": 1280, "height": 720, …}'`.
"""

import json
import sys

from PySide6.QtCore import QTimer, QUrl
from PySide6.QtWebEngineCore import QWebEnginePage
from PySide6.QtWebEngineWidgets import QWebEngineView
from PySide6.QtWidgets import QApplication

# A figure is drawn when it comes into sight.
SETTLED = """
(() => {
  if (!document.documentElement.dataset.ready) return false;
  return [...document.querySelectorAll(".plot")].every((plot) =>
    plot.dataset.drawn || plot.getBoundingClientRect().top > window.innerHeight);
})()
"""
FRAMES_MS = 500  # until what was drawn is on the screen


class Page(QWebEnginePage):
    """A page that keeps what its scripts complain of."""

    def __init__(self):
        super().__init__()
        self.complaints = []

    def javaScriptConsoleMessage(self, level, message, line, source):
        self.complaints.append(f"{source}:{line}: {message}")


class Visit:
    """One page that is opened, waited for, asked and left."""

    def __init__(self, application, order):
        self.application, self.order = application, order
        self.page, self.view = Page(), QWebEngineView()
        self.view.setPage(self.page)
        self.view.resize(order["width"], order["height"])
        self.found = {}
        self.page.loadFinished.connect(lambda _: self.wait())

    def begin(self):
        self.view.show()
        self.page.load(QUrl(self.order["url"]))

    def wait(self):
        self.page.runJavaScript(SETTLED, self.on_settled)

    def on_settled(self, is_settled):
        if not is_settled:
            QTimer.singleShot(50, self.wait)
            return
        asked = f"JSON.stringify((() => {{ {self.order['script']} }})() ?? null)"
        self.page.runJavaScript(asked, self.on_answer)

    def on_answer(self, answer):
        self.found["answer"] = json.loads(answer)
        QTimer.singleShot(FRAMES_MS, self.take_picture)

    def take_picture(self):
        if picture := self.order.get("picture"):
            self.view.grab().save(picture)
        self.page.toHtml(self.leave)

    def leave(self, dom):
        print(json.dumps({**self.found, "dom": dom, "complaints": self.page.complaints}))
        sys.stdout.flush()
        self.application.quit()


def main():
    application = QApplication(sys.argv[:1])
    visit = Visit(application, json.loads(sys.argv[1]))
    visit.begin()
    application.exec()


if __name__ == "__main__":
    main()
