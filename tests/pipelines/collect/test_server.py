# SPDX-License-Identifier: Apache-2.0
"""The server of the page: who one is, what it takes, what it refuses; the page itself in a real browser."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from pydantic import create_model

from tests.support.browser import Browser, find_browser
from tests.support.servers.rewards import serving
from visalign.pipelines.collect.server import read_answer
from visalign.pipelines.collect.store import Plan, VoteStore
from visalign.pipelines.collect.tasks import QUALITY_WORDS, Form, Task

pytest.importorskip("starlette")
httpx = pytest.importorskip("httpx")
vote_server = pytest.importorskip("visalign.pipelines.collect.server").vote_server

ALL = Form(checklist=("Is it red?", "Is it <b>round</b>?"), boxes=True, text=True)


def made(tmp_path: Path, form: Form | None = None, *, single: bool = False, count: int = 6) -> VoteStore:
    for number in range(count):
        for side, level in (("l", 60), ("r", 200)):
            Image.new("RGB", (60, 40), (level, number * 30, 0)).save(tmp_path / f"{side}{number}.png")
    Image.new("RGB", (4, 4)).save(tmp_path / "r1.bmp")
    tasks = []
    for number in range(count):
        right = "r1.bmp" if number == 1 else f"r{number}.png"
        files = (str(tmp_path / f"l{number}.png"), str(tmp_path / right))
        tasks.append(Task(prompt=f"image <i>{number}</i>", images=files[: 1 if single else 2]))
    return VoteStore.create(tmp_path / "v.sqlite", tasks, form or Form(), Plan(repeat_every=0))


@pytest.fixture
def store(tmp_path: Path) -> VoteStore:
    return made(tmp_path, ALL)


@pytest.fixture
def url(store: VoteStore) -> Iterator[str]:
    with serving(vote_server(store)) as url:
        yield url


CLIENTS: list[Any] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while CLIENTS:
        CLIENTS.pop().close()


def client_of(url: str, **more: Any) -> Any:
    CLIENTS.append(httpx.Client(base_url=url, **more))
    return CLIENTS[-1]


def joined(url: str, name: str, **more: str) -> Any:
    client = client_of(url)
    assert client.post("/join", json={"name": name, **more}).json()["name"] == name
    return client


def test_a_vote_from_the_first_question_to_the_file(store, url):
    ada = joined(url, "Ada")
    question = ada.post("/next", json={}).json()
    assert question["answered"] == 0 and question["total"] == 6 and set(question) == {
        "name", "link", "answered", "total", "assignment", "prompt", "images", "answer",
    }  # fmt: skip
    for side, address in question["images"].items():
        response = ada.get(address)
        assert response.headers["content-type"] == "image/png", side
        assert "l0" not in str(response.headers) and response.content[:4] == b"\x89PNG"
        assert response.headers["cache-control"] == "no-store", "the next file of votes has the same numbers"
    answer = {"choice": "left", "checklist": {"Is it red?": False}, "text": "Händ 🖐"}
    answer["boxes"] = [["left", 0, 0, 0.5, 1]]
    sent = {"client": "c1", "assignment": question["assignment"], "answer": answer, "seconds": 2.5}
    for _ in range(2):
        assert ada.post("/vote", json=sent).json() == {"kept": "c1"}
    (vote,) = store.votes()
    side = "right" if vote.swapped else "left"
    assert vote.answer["choice"] == side and vote.answer["boxes"] == [[side, 0, 0, 0.5, 1]]
    assert vote.answer["text"] == "Händ 🖐" and vote.seconds == 2.5
    back = ada.post("/back", json={}).json()
    assert back["assignment"] == question["assignment"] and back["answer"] == answer
    assert ada.post("/back", json={"assignment": question["assignment"]}).status_code == 404
    link = ada.post("/next", json={}).json()["link"]
    other = client_of(url, follow_redirects=True)  # the same person at another machine
    assert other.get(link).status_code == 200 and other.post("/next", json={}).json()["name"] == "Ada"
    ada.post("/leave", json={})
    assert ada.post("/next", json={}).status_code == 401


LEFT = {"choice": "left"}
REFUSED = (
    ({"assignment": 99}, 403, "Task 99 was not given to Ada"),
    ({"assignment": "1"}, 422, "assignment is '1': Input should be a valid integer"),
    ({"seconds": -1}, 422, "seconds is -1: Input should be greater than or equal to 0"),
    ({"answer": [1]}, 422, r"answer is \[1\]: Input should be a valid dictionary"),
    ({"answer": {"choice": "LEFT"}}, 422, "choice is 'LEFT': Input should be 'left', 'right' or 'tie'"),
    ({"answer": LEFT | {"slider": 3}}, 422, "slider was not asked; asked were choice, checklist"),
    ({"answer": LEFT | {"\ud83d": 1}}, 422, "unable to parse raw data as a unicode string"),
    ({"answer": LEFT | {"text": "x" * 4001}}, 422, "at most 4000 characters"),
    ({"answer": LEFT | {"checklist": {"Is it blue?": True}}}, 422, "checklist.Is it blue"),
    ({"answer": LEFT | {"boxes": [["left", 0, 0, 2, 1]]}}, 422, "less than or equal to 1"),
    ({"answer": LEFT | {"boxes": [["left", 1, 0, 0, 1]]}}, 422, "in shares of the image, 0 to 1"),
    ({"answer": LEFT | {"boxes": [["left", 0, 0, 1, 1]] * 33}}, 422, "at most 32 items"),
)


def test_invalid_votes_are_refused_by_name_and_nothing_is_stored(store, url):
    ada = joined(url, "Ada")
    number = ada.post("/next", json={}).json()["assignment"]
    for changes, status, why in REFUSED:
        sent = {"client": "c", "assignment": number, "answer": LEFT, "seconds": 1} | changes
        head = {"Content-Type": "application/json"}
        answer = ada.post("/vote", content=json.dumps(sent), headers=head)  # httpx refuses half a surrogate
        assert answer.status_code == status and re.search(why, answer.json()["error"]), (changes, answer.text)
    assert store.votes() == []


def test_a_text_cut_inside_an_emoji_is_kept():
    model = create_model("Answer", text=(str, ""))
    assert read_answer({"text": "fine \ud83d"}, model) == {"text": "fine ?"}


def test_another_s_vote_too_much_and_what_is_no_json(store, url):
    ada, bob = joined(url, "Ada"), joined(url, "Bob")
    number = ada.post("/next", json={}).json()["assignment"]
    sent = {"client": "c", "assignment": number, "answer": {"choice": "left"}, "seconds": 1}
    assert "was not given to Bob" in bob.post("/vote", json=sent).json()["error"]
    assert bob.get(f"/image/{number}/left").status_code == 403
    assert httpx.get(f"{url}/image/{number}/left").status_code == 401
    assert httpx.get(f"{url}/image/{10**30}/left", cookies=dict(ada.cookies)).status_code == 403
    assert ada.get(f"/image/{number}/top").status_code == 404
    head = {"Content-Type": "application/json"}
    for content, status in ((b"x" * 10_000_000, 413), (b"{", 400), (b"[" * 60_000, 400), (b"[]", 422), (b"\xff", 400)):
        assert ada.post("/vote", content=content, headers=head).status_code == status
    assert ada.post("/vote", content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415
    foreign = ada.post("/vote", json=sent, headers={"Origin": "http://evil.example"})
    assert foreign.status_code == 403 and "only the page of this server" in foreign.json()["error"]
    assert ada.post("/join", json={"name": "Bob"}).status_code == 409
    assert ada.post("/join", json={"name": 7}).status_code == 422
    assert ada.get("/?me=wrong").status_code == 401 and ada.get("/vote").status_code == 405
    assert store.votes() == []


def test_who_is_not_invited_and_who_asks_under_another_name(store):
    with serving(vote_server(store, invite="code", hosts=["127.0.0.1"])) as url:
        response = httpx.post(f"{url}/join", json={"name": "Eve", "invite": "guess"})
        assert response.status_code == 403 and "Only invited people" in response.json()["error"]
        joined(url, "Ada", invite="code")
        assert httpx.get(url, headers={"Host": "evil.example"}).status_code == 400


def test_unreadable_requests_are_400(store, url):
    ada = joined(url, "Ada")
    number = ada.post("/next", json={}).json()["assignment"]
    ballot = {"client": "c\0", "assignment": number, "answer": LEFT, "seconds": 1}
    assert ada.post("/vote", json=ballot).status_code == 400
    assert ada.post("/vote", json=ballot | {"client": r"c\u0000"}).status_code == 200, "a backslash in words"
    assert ada.get(f"/image/{'9' * 4301}/left").status_code == 400
    head = [(b"content-type", b"application/json"), (b"content-length", b"99")]
    scope = {"type": "http", "method": "POST", "path": "/vote", "headers": head, "query_string": b""}
    sent: list[Any] = []

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(vote_server(store)(scope, receive, send))
    assert sent[0]["status"] == 400, "a POST that breaks off"


def test_a_link_takes_no_browser_from_its_voter(url):
    ada, eve = joined(url, "Ada"), joined(url, "Eve")
    own, other = (client.post("/next", json={}).json()["link"] for client in (ada, eve))
    refused = ada.get(other)
    assert refused.status_code == 409 and "votes as 'Ada'" in refused.json()["error"]
    assert ada.post("/next", json={}).json()["name"] == "Ada" and ada.get(own).status_code == 303
    ada.post("/leave", json={})
    assert ada.get(other).status_code == 303 and ada.post("/next", json={}).json()["name"] == "Eve"


def test_the_progress_is_for_whoever_has_its_key(store):
    with serving(vote_server(store, progress=("key", "http://here/"))) as url:
        assert httpx.get(f"{url}/progress?key=guess").status_code == 403
        empty = httpx.get(f"{url}/progress?key=key").text
        assert "Nobody has joined yet" in empty and "http://here/" in empty and "0 of 18" in empty
        ada = joined(url, "Ada")
        number = ada.post("/next", json={}).json()["assignment"]
        ada.post("/vote", json={"client": "c", "assignment": number, "answer": LEFT, "seconds": 2})
        page = httpx.get(f"{url}/progress?key=key").text
        assert "1 of 18" in page and "Ada" in page and "2.0" in page and 'data-reload="5"' in page
    with serving(vote_server(store)) as url:
        assert httpx.get(f"{url}/progress?key=").status_code == 403


def test_an_invitation_registers_so_many_names(store, monkeypatch):
    monkeypatch.setattr("visalign.pipelines.collect.server.MOST_NAMES", 2)
    with serving(vote_server(store, invite="code")) as url:
        answers = [httpx.post(f"{url}/join", json={"name": name, "invite": "code"}) for name in ("a", "b", "b", "c")]
    assert [answer.status_code for answer in answers] == [200, 200, 403, 403]
    assert "2 names have joined by this invitation" in answers[-1].json()["error"]


def test_a_full_disk_is_said_and_loses_no_vote(store, url):
    ada = joined(url, "Ada")
    number = ada.post("/next", json={}).json()["assignment"]
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages}")  # SQLite then reports a full disk
    ballot = {"assignment": number, "answer": LEFT | {"text": "x" * 4000}, "seconds": 1}
    for client in range(9):
        answer = ada.post("/vote", json=ballot | {"client": str(client)})
    assert answer.status_code == 507 and "database or disk is full" in answer.json()["error"]
    store._db.execute(f"PRAGMA max_page_count = {pages + 99}")
    assert ada.post("/vote", json=ballot | {"client": "8"}).status_code == 200


def test_an_image_that_has_gone_is_said(store, url):
    ada = joined(url, "Ada")
    question = ada.post("/next", json={}).json()
    for path in (*store.path.parent.glob("*.png"), *store.path.parent.glob("*.bmp")):
        path.unlink()
    response = ada.get(question["images"]["left"])
    assert response.status_code == 404 and response.json()["error"] == "The image cannot be read: FileNotFoundError."


SIDES = ("left", "top", "width", "height")
BROWSER = find_browser()
in_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium on the path; the page is unchecked")


@pytest.fixture
def browser() -> Iterator[Browser]:
    browser = Browser(str(BROWSER))
    yield browser
    browser.close()


def open_page(browser: Browser, url: str, width: int, height: int) -> None:
    browser.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
    )
    browser.visit(url)


def type_name(browser: Browser, name: str) -> None:
    browser.until("document.activeElement.id", "name")
    browser.call("Input.insertText", text=name)
    browser.press("Enter", 13)
    browser.until("document.querySelector('#task').hidden", False)


@pytest.mark.slow
@in_browser
def test_pairs_by_keyboard_alone(tmp_path, browser):
    with closing(made(tmp_path, ALL)) as store, serving(vote_server(store)) as url:
        open_page(browser, url, 390, 844)
        type_name(browser, "Ada")
        assert browser.value("document.documentElement.scrollWidth") <= 390
        assert browser.value("document.querySelector('#prompt').textContent").startswith("image <i>")
        browser.until("ready && [...document.images].every((image) => image.style.width)")
        link = browser.value("document.querySelector('#link').href")
        assert link.startswith(f"{url}/?me=") and store.voter(link.partition("=")[2]) == "Ada"
        browser.press("Enter", 13)
        browser.until("document.querySelector('#said').textContent.startsWith('Choose an image')")
        browser.press("ArrowLeft", 37)
        assert browser.value("document.querySelector('[aria-pressed=true]').dataset.choice") == "left"
        browser.value("document.querySelectorAll('.add')[1].focus()")
        browser.press("Enter", 13)
        browser.press("ArrowRight", 39)
        browser.value("document.activeElement.blur()")
        browser.press("Enter", 13)
        browser.until("document.querySelector('#progress').value", 1)
        (vote,) = store.votes()
        sides = {"left": "right", "right": "left"} if vote.swapped else {"left": "left", "right": "right"}
        assert vote.answer["choice"] == sides["left"]
        (box,) = vote.answer["boxes"]
        assert box[0] == sides["right"] and box[1:] == pytest.approx([0.42, 0.4, 0.62, 0.6])
        browser.until("ready")
        browser.press("ArrowDown", 40)
        browser.press("Enter", 13)
        browser.until("document.querySelector('#progress').value", 2)
        browser.press("Backspace", 8)
        browser.until("ready && document.querySelector('[aria-pressed=true]')?.dataset.choice", "tie")
        browser.press("ArrowRight", 39)
        browser.press("Enter", 13)
        browser.until("document.querySelector('[aria-pressed=true]') === null")
        assert [v.answer["choice"] for v in store.votes()][1] != "tie" and len(store.votes()) == 2
        assert not browser.seen("Runtime.exceptionThrown")


@pytest.mark.slow
@in_browser
def test_one_image_with_a_slider_and_a_box_drawn_by_pointer(tmp_path, browser):
    with (
        closing(made(tmp_path, Form(slider=QUALITY_WORDS, boxes=True, text=True), single=True, count=2)) as store,
        serving(vote_server(store)) as url,
    ):
        open_page(browser, url, 390, 844)
        type_name(browser, "Ada")
        # The name's field takes no key once the question is there, even before the next frame is drawn.
        assert browser.value("start(), show(now), document.activeElement.tagName") == "BODY"
        browser.press("4", 52)
        assert browser.value("document.querySelector('#word').textContent") == "good"
        browser.until("ready && [...document.images].every((image) => image.style.width)")
        area = [browser.value(f"document.images[0].getBoundingClientRect().{s}") for s in SIDES]
        for kind, share in (("mousePressed", 0.25), ("mouseMoved", 0.5), ("mouseReleased", 0.5)):
            x, y = area[0] + share * area[2], area[1] + share * area[3]
            browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        browser.value("document.querySelector('#text').value = 'a blur'")
        browser.press("Enter", 13)
        browser.until("document.querySelector('#progress').value", 1)
        (vote,) = store.votes()
        assert vote.answer["slider"] == 4 and vote.answer["text"] == "a blur"
        assert vote.answer["boxes"][0][1:] == pytest.approx([0.25, 0.25, 0.5, 0.5], abs=0.02)
        browser.until("ready")
        browser.press("2", 50)
        browser.press("Enter", 13)
        browser.until("document.querySelector('#end').hidden", False)


@pytest.mark.slow
@in_browser
def test_nobody_votes_on_what_is_not_shown(tmp_path, browser):
    """Keys wait for the images; an image that cannot be read is passed over, and is no vote."""
    slow = "HTMLImageElement.prototype.decode = () => new Promise((...e) => (window.ends ||= []).push(e))"
    with closing(made(tmp_path, Form(), count=3)) as store, serving(vote_server(store)) as url:
        open_page(browser, url, 1280, 900)
        type_name(browser, "Ada")
        browser.until("ready")
        browser.value(f"{slow}, show(now), 0")
        browser.press("ArrowLeft", 37)
        browser.until("document.querySelector('#said').textContent", "The images are still on their way.")
        assert browser.value("document.querySelector('#task').getAttribute('aria-busy')") == "true"
        assert not store.votes()
        browser.value("ends.splice(0).forEach(([seen]) => seen()), 0")
        browser.until("ready")
        browser.press("ArrowLeft", 37)
        browser.until("document.querySelector('#progress').value", 1)
        browser.value("ends.splice(0).forEach(([, broken]) => broken()), 0")
        browser.until("document.querySelector('#unseen').hidden", False)
        browser.value("document.querySelector('#unseen').click()")
        browser.until("document.querySelector('#progress').value", 2)
        assert len(store.votes()) == 1 and store.unseen() == 1
        browser.value("document.querySelector('#leave').click()")
        browser.until("document.querySelector('#join').hidden", False)
        assert browser.value("document.querySelector('#who').textContent") == ""
        assert not browser.seen("Runtime.exceptionThrown")
