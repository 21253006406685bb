"""The web page in a real browser: what it shows, live, at any width, in the dark, and without a mouse.

Set WEB_SCREENSHOTS to a folder to look at the pictures.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from mig_agent.client import Client
from support.agent import Agent, eventually
from support.chromium import Browser, Page
from support.web import FLAGS, Web

SIXTEEN = "a100-80gb:8,h100-80gb:8"
LIVE = "document.querySelector('#connection').textContent === 'live'"
NAME = "llama-3-70b-finetune-lora-rank-64-lr-3e-5-seed-12345"
HOSTILE = "<img src=x onerror=alert(1)>&amp;"


def address(web: Web, token: str = "") -> str:
    return f"{web.url}#token={token or web.token}"


def rows(page: Page, table: str) -> list[list[str]]:
    """The visible texts of a table's cells."""
    cells = "[...row.cells].map((cell) => cell.innerText)"
    script = f"[...document.querySelector('{table}').tBodies[0].rows].map((row) => {cells})"
    found: list[list[str]] = page.evaluate(script)
    return found


def overflowing(page: Page) -> list[str]:
    """The elements that are wider than the page, and texts of the map that reach out of their boxes."""
    found: list[str] = page.evaluate("""
      [...document.querySelectorAll("body *")].filter((each) => {
        const box = each.getBoundingClientRect();
        return box.width > 1 && !each.closest("thead") && (box.right > innerWidth + 1 || box.left < -1);
      }).map((each) => each.outerHTML.slice(0, 120)).concat(
        [...document.querySelectorAll("#maps g")].filter((group) => {
          const right = (each) => each.getBoundingClientRect().right, end = right(group.querySelector("rect")) + 1;
          return [...group.querySelectorAll("text")].some((text) => right(text) > end);
        }).map((each) => each.textContent)
      )""")
    return found


def keep(page: Page, name: str) -> None:
    """Leaves a picture where somebody wants to look at it."""
    if folder := os.environ.get("WEB_SCREENSHOTS"):
        page.screenshot(Path(folder) / f"{name}.png")


@pytest.mark.parametrize("gpus", ["a100-80gb:1", SIXTEEN], ids=["1", "16"])
def test_it_fits_any_screen_in_light_and_dark(folder: Path, browser: Browser, gpus: str) -> None:
    with Agent(folder, gpus, flags=FLAGS) as agent, Client(agent.address) as client:
        count = 16 if gpus == SIXTEEN else 1
        for number in range(3 * count):
            client.acquire(gpu_memory="9G" if number % 3 else "18G", name=NAME if number % 2 else "eval", ttl=3600)
        with agent.begin("request", "--mig-profile", "7g.80gb", "--name", NAME, "--wait", "10m") as waits:
            grounds = set()
            web = Web(agent)
            for width, dark in ((1280, False), (1280, True), (400, False), (400, True)):
                with browser.page(address(web), width=width, dark=dark) as page:
                    page.until(LIVE)
                    page.until("!document.querySelector('#waste-words').textContent.startsWith('Reading')")
                    assert page.evaluate("document.documentElement.scrollWidth") <= width
                    assert overflowing(page) == []
                    assert page.evaluate("document.querySelectorAll('#maps svg').length") == count
                    grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
                    keep(page, f"{count}-gpus-{width}-{'dark' if dark else 'light'}")
                    assert page.complaints() == []
                    # Nothing but the agent is asked for anything.
                    assert {each for each in page.requested() if not each.startswith((web.url, "data:"))} == set()
            assert len(grounds) == 2
            waits.kill()


def test_it_changes_with_the_node_and_answers_its_three_questions(folder: Path, browser: Browser) -> None:
    with Agent(folder, "a100-80gb:1", flags=FLAGS) as agent:
        web = Web(agent)
        with browser.page(address(web)) as page:
            page.until(LIVE)
            assert page.evaluate("location.hash + location.search") == ""  # the token is in no history
            assert "Nothing is leased." in page.text("#shown")
            assert "No request is waiting." in page.text("#waits-title + p")
            # What is where
            lease = agent.ask("request", "--gpu-memory", "30G", "--name", "first", "--ttl", "1h")["lease"]
            page.until("document.querySelector('#leases').tBodies[0].rows.length === 1")
            holder, devices, _, ends, _, shown = rows(page, "#leases")[0]
            assert (devices, shown) == ("GPU 0, slices 4-7: 3g.40gb", lease)
            assert "first" in holder
            assert re.fullmatch(r"in (1 h|59 min)", ends)
            described = page.evaluate("document.querySelector('#maps svg desc').textContent")
            assert "slices 4-7: 3g.40gb, leased, " in described
            # Why am I waiting, and how long
            with agent.begin("request", "--mig-profile", "7g.80gb", "--name", "second", "--wait", "5m") as second:
                page.until("document.querySelector('#waits').tBodies[0].rows.length === 1")
                place, who, wants, _, start, blocked = rows(page, "#waits")[0]
                assert (place, wants) == ("1", "7g.80gb")
                assert "second" in who
                assert start.startswith("within ")
                assert "from deadlines" in start
                assert re.match(r"GPU 0: .*first.*, until \d\d:\d\d", blocked)
                assert "1 waiting" in page.evaluate("document.title")
                agent.migctl("release", lease)
                page.until("document.querySelector('#waits').hidden")
                page.until("document.querySelector('#leases').tBodies[0].rows[0].textContent.includes('second')")
                second.communicate()
            # What was wasted
            page.evaluate("readUsage()")
            page.until("document.querySelector('#by-user').tBodies[0].rows.length === 1")
            assert "GiB-hours were leased in " in page.text("#waste-words")
            assert page.complaints() == []


def test_names_are_texts_whatever_is_in_them(folder: Path, browser: Browser) -> None:
    with Agent(folder, "a100-80gb:1", flags=FLAGS) as agent, Client(agent.address) as client:
        client.acquire(gpu_memory="70G", name=HOSTILE)
        with browser.page(address(Web(agent), Web(agent).admin_token)) as page:
            page.until(LIVE)
            page.until("!document.querySelector('#waste-words').textContent.startsWith('Reading')")
            assert HOSTILE in rows(page, "#leases")[0][0]
            assert HOSTILE in page.evaluate("document.querySelector('#maps').textContent")
            assert page.evaluate("document.querySelectorAll('img').length") == 0
            assert page.complaints() == []


def test_it_asks_for_a_token_and_takes_it_from_the_keyboard(folder: Path, browser: Browser) -> None:
    with Agent(folder, "a100-80gb:1", flags=FLAGS) as agent:
        web = Web(agent)
        with browser.page(address(web, "0" * 64)) as page:
            page.until("!document.querySelector('#sign-in').hidden")
            page.until("document.querySelector('#sign-in-why').textContent.includes('does not take this token')")
            assert page.evaluate("document.querySelector('#shown').hidden")
            assert page.evaluate("document.activeElement.id") == "token"
            page.type(web.token)
            page.press("Enter")
            page.until(LIVE)
            assert page.evaluate("document.querySelector('#sign-in').hidden")
            assert page.evaluate("localStorage.length + document.cookie.length") == 0
            page.evaluate("document.activeElement.blur()")
            page.press("Tab")
            assert page.evaluate("document.activeElement.id") == "filter"
            page.press("Tab")
            assert page.evaluate("document.activeElement.localName") == "summary"
            before = page.evaluate("document.activeElement.parentElement.open")
            page.press("Enter")
            assert page.evaluate("document.activeElement.parentElement.open") is not before


def test_it_comes_back_after_the_agent(folder: Path, browser: Browser) -> None:
    with Agent(folder, "a100-80gb:1", flags=("--web", "127.0.0.1:0")) as first:
        port = Web(first).port
    with Agent(folder, "a100-80gb:1", flags=("--web", f"127.0.0.1:{port}")) as agent:
        eventually(lambda: agent.serving()["web"].startswith("http"), "the port is free")
        with browser.page(address(Web(agent))) as page:
            page.until(LIVE)
            agent.kill()
            page.until("document.querySelector('#connection').textContent.startsWith('the agent does not answer')")
            assert "shown as of" in page.text("#connection")
            agent.start()
            page.until(LIVE)


def test_it_is_named_for_those_who_do_not_see_it(folder: Path, browser: Browser) -> None:
    with Agent(folder, "a100-80gb:1", flags=FLAGS) as agent:
        agent.ask("request", "--gpu-memory", "30G")
        with browser.page(address(Web(agent))) as page:
            page.until(LIVE)
            time.sleep(0.2)
            page.call("Accessibility.enable")
            nodes = page.call("Accessibility.getFullAXTree")["nodes"]
            seen = {(each.get("role", {}).get("value"), each.get("name", {}).get("value")) for each in nodes}
            assert ("image", "GPU 0: NVIDIA A100-SXM4-80GB") in seen
            assert {name for role, name in seen if role == "heading"} >= {
                "What is where",
                "Why am I waiting, and how long",
            }
            assert ("searchbox", "Show only") in seen
            assert any(role == "status" for role, _ in seen)
            unnamed = [role for role, name in seen if role in {"button", "searchbox", "textbox", "image"} and not name]
            assert unnamed == []
