"""The page in a real browser: nothing of a job runs, it fits a phone, a keyboard reaches all, and it renews itself.

It needs Debian's package chromium, which the tests install where they may.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from everstep_local.run.page import LocalJobs, key_of, served
from support.page import pictures
from support.page.browser import Tab, opened
from support.page.folders import run_folder

pytestmark = [pytest.mark.long, pytest.mark.browser, pytest.mark.timeout(300)]

LUMINANCE = """
(() => {
  const level = (text) => {
    const parts = text.match(/[\\d.]+/g).slice(0, 3).map((each) => Number(each) / 255);
    const linear = parts.map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const ground = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const colour = getComputedStyle(each).backgroundColor;
      if (!colour.startsWith("rgba(0, 0, 0, 0")) return colour;
    }
    return getComputedStyle(document.body).backgroundColor;
  };
  const faint = [];
  for (const element of document.querySelectorAll("main *, header *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || element.closest("svg, .hidden, .uplot, noscript, option")) continue;
    const [one, two] = [level(getComputedStyle(element).color), level(ground(element))].sort((a, b) => b - a);
    const ratio = (one + 0.05) / (two + 0.05);
    if (ratio < 4.5) faint.push(`${element.tagName} ${element.textContent.slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return faint;
})()
"""
CUT = """
[...document.querySelectorAll(".wide:has(table)")].filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.id)
"""


@asynccontextmanager
async def page_of(folder: Path, *, javascript: bool = True) -> AsyncIterator[tuple[Tab, str, str]]:
    """A tab that has the token, the page's address, and the path of the run in this folder."""
    async with served(LocalJobs(str(folder.parent)), None, 0) as address, opened(javascript=javascript) as tab:
        await tab.show(address)
        yield tab, address.partition("/?")[0], f"/jobs/{key_of(folder)}"
        assert tab.problems == []


@pytest.fixture
def evil(browser_program: None, tmp_path: Path) -> Path:
    del browser_program  # there before the first test
    return run_folder(tmp_path / "runs" / "digits-1")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_texts_of_a_job_run_nothing_fit_a_phone_and_can_be_read(evil: Path, dark: bool) -> None:
    async with page_of(evil) as (tab, base, job):
        for path in ("/", job, "/nothing"):
            for width in (320, 1200):
                await tab.show(base + path, width=width, dark=dark)
                wide = await tab.value("document.documentElement.scrollWidth > innerWidth")
                assert not wide, f"{path} is wider than {width} pixels"
                assert width > 320 or await tab.value(CUT) == [], "a table of cards has nothing to scroll to"
                assert await tab.value(LUMINANCE) == [], "WCAG 2.2 asks for a contrast of 4.5"
        tab.problems.remove("Failed to load resource: the server responded with a status of 404 (Not Found)")
        tab.problems.remove("Failed to load resource: the server responded with a status of 404 (Not Found)")


async def test_keyboard_reaches_everything_and_shows_where_it_is(evil: Path) -> None:
    async with page_of(evil) as (tab, base, _):
        await tab.show(f"{base}/")
        await tab.press("Tab")
        assert await tab.value("document.activeElement.textContent") == "Skip to the content"
        reached = set()
        for _ in range(30):
            await tab.press("Tab")
            reached.add(await tab.value("document.activeElement.id || document.activeElement.name || ''"))
            seen = await tab.value(
                "document.activeElement === document.body || document.activeElement.matches(':focus-visible') "
                "&& getComputedStyle(document.activeElement).outlineStyle !== 'none'"
            )
            assert seen, "who has the focus can be seen"
            if await tab.value("(document.activeElement.id || '').startsWith('job-')"):
                break
        assert {"pause", "q", "status", "wide-jobs"} <= reached
        await tab.press("Enter")
        await tab.until("location.pathname.startsWith('/jobs/')")


async def test_page_renews_itself_keeps_the_readers_place_and_stops_when_it_is_told_to(evil: Path) -> None:
    async with page_of(evil) as (tab, base, job):
        await tab.show(base + job, width=400)
        await tab.until("document.querySelectorAll('#curves canvas').length === 2")
        await tab.value(
            "window.before = document.getElementById('live'); window.curve = document.querySelector('canvas')"
        )
        await tab.value("document.getElementById('wide-timeline').scrollTo(120, 0)")
        await tab.value("document.getElementById('timeline-text').open = true")
        await tab.value("document.getElementById('wide-timeline').focus()")
        await tab.until("document.getElementById('live') !== window.before")
        await tab.until("document.getElementById('wide-timeline').scrollLeft === 120")
        await tab.until("document.getElementById('timeline-text').open")
        assert await tab.value("document.activeElement.id") == "wide-timeline", "the focus stays"
        assert await tab.value("document.querySelector('canvas') === window.curve"), "a curve is not drawn anew"
        await tab.value("document.getElementById('pause').click()")
        assert await tab.value("document.getElementById('pause').getAttribute('aria-pressed')") == "true"
        await tab.value("window.before = document.getElementById('live')")
        await tab.value("new Promise((done) => setTimeout(done, 6500))")
        assert await tab.value("document.getElementById('live') === window.before")


async def test_without_javascript_all_facts_are_there(evil: Path) -> None:
    async with page_of(evil, javascript=False) as (tab, base, job):
        await tab.show(base + job)
        text = await tab.value("document.body.innerText")
        for part in ("Timeline", "productive", "last line", "Checkpoints", "The timeline has both curves"):
            assert part in text
        assert await tab.value("getComputedStyle(document.getElementById('pause')).display") == "none"


@pytest.mark.parametrize("picture", pictures.PICTURES, ids=lambda picture: picture.name)
async def test_pictures_of_the_documents_can_be_taken_anew(browser_program: None, picture: pictures.Picture) -> None:
    async with pictures.served() as (base, token), opened() as tab:
        await tab.show(f"{base}{pictures.JOB}?token={token}", width=picture.width, dark=picture.dark)
        await tab.until("document.querySelectorAll('#curves canvas').length === 2")
        html = await tab.value(f"fetch('{pictures.JOB}').then((answer) => answer.text())")
        top = f"document.getElementById('{picture.until}').getBoundingClientRect().top + scrollY"
        taken = await tab.picture(picture.width, int(await tab.value(top)) - pictures.MARGIN)
        assert tab.problems == []
    assert pictures.width(taken) == picture.width
    if os.environ.get("EVERSTEP_REWRITE"):
        picture.path.write_bytes(pictures.with_digest(taken, pictures.digest(html)))
