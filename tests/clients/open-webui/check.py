"""Open WebUI, as it is used in a browser: its own server, over OpenAI's API and over Ollama's at the same time."""

import json
import os
import socket
import subprocess
import time
import urllib.request
from contextlib import closing

from playwright.sync_api import Browser, Page, sync_playwright
from program import HOME, launched
from report import KEY, SLOW, TALK, TALK_TEXT, URL, V1, holds, run, same

OLLAMA = "ollama"
"""Stands before the names of models that it sees over Ollama's API."""
START_SECONDS = 600.0
PAGE_MILLISECONDS = 120_000.0
SETTINGS = {
    "DATA_DIR": str(HOME / "data"),
    "ENABLE_OLLAMA_API": "true",
    "OLLAMA_BASE_URL": URL,
    "OLLAMA_API_CONFIGS": json.dumps({"0": {"enable": True, "prefix_id": OLLAMA, "key": KEY}}),
    "RAG_EMBEDDING_ENGINE": "openai",
    "RAG_EMBEDDING_MODEL": TALK,
    "RAG_OPENAI_API_BASE_URL": V1,
    "RAG_OPENAI_API_KEY": KEY,
    "WEBUI_AUTH": "False",
    # Requests beside those of the person.
    "ENABLE_FOLLOW_UP_GENERATION": "false",
    "ENABLE_TAGS_GENERATION": "false",
    "ENABLE_TITLE_GENERATION": "false",
    # It fetches nothing from elsewhere.
    "HF_HUB_OFFLINE": "1",
    "OFFLINE_MODE": "true",
}


def free_port() -> int:
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def serve(port: int) -> subprocess.Popen[bytes]:
    """Start its server as `weft launch openwebui` does, and wait until it answers."""
    command, environment = launched("openwebui", TALK)
    (HOME / "data").mkdir()
    # Its modules take a minute to compile, which is done once if the result may be kept.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    server = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)], env={**inherited, **environment, **SETTINGS}
    )
    give_up = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < give_up:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
        except OSError:
            time.sleep(0.2)
        else:
            return server
    raise SystemExit("it does not serve")


class Person:
    """Who uses it in a browser."""

    def __init__(self, browser: Browser, address: str) -> None:
        self._address = address
        self.page: Page = browser.new_context(locale="en-US").new_page()
        self.page.set_default_timeout(PAGE_MILLISECONDS)
        self._has_read_the_news = False

    def open(self, model: str) -> None:
        self.page.goto(f"{self._address}/?models={model}")
        self.page.locator("#chat-input").wait_for()
        if not self._has_read_the_news:
            self.page.get_by_role("button", name="Close", exact=True).click()
            self._has_read_the_news = True

    def found(self, model: str) -> list[str]:
        """The models of its list that a search for one shows: of a long list it draws only what is in view."""
        self.open(TALK)
        self.page.locator("#model-selector-model-button").click()
        self.page.locator("#model-search-input").fill(model)
        self.page.locator("[role=option]").first.wait_for()
        return self.page.locator("[data-value]").evaluate_all("found => found.map(one => one.dataset.value)")

    def chat(self, model: str) -> None:
        """Say something; the answer grows on the page."""
        self.open(model)
        same(self.page.locator("#model-selector-model-button").inner_text().strip(), model)
        self.page.locator("#chat-input").click()
        self.page.keyboard.type("Hello")
        self.page.keyboard.press("Enter")
        first, last = TALK_TEXT.split()[0], TALK_TEXT.split()[-1]
        answer = self.page.locator(".chat-assistant")
        answer.get_by_text(first).wait_for()
        holds(last not in answer.inner_text(), "the answer came as a whole")
        answer.get_by_text(TALK_TEXT).wait_for()

    def ask(self, path: str, body: str = "undefined") -> dict:
        """A request of its page to its server, a POST if it has a body, which is JavaScript."""
        return self.page.evaluate(
            """async ([path, body]) => {
                const made = new Function(`return ${body}`)();
                const headers = { authorization: `Bearer ${localStorage.token}` };
                if (typeof made === "string") headers["content-type"] = "application/json";
                const answer = await fetch(path, { method: made ? "POST" : "GET", headers, body: made });
                return { ...(await answer.json()), http: answer.status };
            }""",
            [path, body],
        )


def lists(person: Person, model: str) -> None:
    models = person.found(model)
    holds(model in models, f"it finds {models}")


def embeds(person: Person, model: str) -> None:
    asked = json.dumps({"model": model, "input": ["a cat", "a kitten"]})
    answer = person.ask("/api/v1/embeddings", json.dumps(asked))
    same([answer["http"], len(answer.get("data", ()))], [200, 2])
    holds(len(answer["data"][0]["embedding"]) > 1, "no vector")


def reads_a_file(person: Person) -> None:
    """It makes vectors of a file's text, by which it finds the text later."""
    form = "(form => (form.append('file', new File(['The sea is wide and deep.'], 'notes.txt')), form))(new FormData())"
    sent = person.ask("/api/v1/files/?process=true&process_in_background=false", form)
    same(sent["http"], 200)
    same(person.ask(f"/api/v1/files/{sent['id']}/process/status")["status"], "completed")


port = free_port()
server = serve(port)
with sync_playwright() as playwright:
    # What is told to others than its own page fails at once.
    hosts = "MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"
    without_proxy = {name: value for name, value in os.environ.items() if not name.endswith("_PROXY")}
    browser = playwright.chromium.launch(
        executable_path=os.environ["WEFT_BROWSER"],
        args=[
            "--headless=shell",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            f"--host-resolver-rules={hosts}",
        ],
        env={**without_proxy, "LD_LIBRARY_PATH": os.environ["WEFT_BROWSER_LIBRARIES"]},
    )
    person = Person(browser, f"http://127.0.0.1:{port}")
    run(
        {
            "models_list": lambda: lists(person, TALK),
            "chat_stream": lambda: person.chat(SLOW),
            "embeddings_vectors": lambda: embeds(person, TALK),
            "embeddings_document": lambda: reads_a_file(person),
            "tags_list": lambda: lists(person, f"{OLLAMA}.{TALK}"),
            "talk_stream": lambda: person.chat(f"{OLLAMA}.{SLOW}"),
            "embed_vectors": lambda: embeds(person, f"{OLLAMA}.{TALK}"),
        }
    )
    browser.close()
server.terminate()
server.wait()
