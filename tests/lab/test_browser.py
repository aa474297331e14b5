"""The pages in a real browser: selections in the explorer, and updates of a served page.

Needs `pip install playwright`, and Debian's `chromium-headless-shell` or `chromium`.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_build import write_run
from test_under_way import write_partial

from nemo_rod.lab.report import build_report
from nemo_rod.lab.report.explorer import explore
from nemo_rod.lab.report.serve import serve

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium"),
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Base and RoD are evaluated, and another arm is in training."""
    run = write_run(
        tmp_path_factory.mktemp("runs") / "german_smollm2_135m_debian",
        arms=("base", "no_replay", "rod"),
    )
    write_partial(run.folder / "arms" / "fixed_32.partial", 4, 10)
    build_report(
        run.folder,
        arms=["base", "no_replay", "fixed_32", "rod"],
        texts=lambda store, ids: [f"The text of block {n} <b>as it is</b>" for n in ids],
    )
    return run


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


def open_page(browser: Any, size: str, url: str) -> Any:
    width, height = SIZES[size]
    page = browser.new_page(viewport={"width": width, "height": height})
    page.set_default_timeout(600_000)
    page.failures = []
    page.on("pageerror", lambda error: page.failures.append(str(error)))
    page.on("console", lambda line: line.type == "error" and page.failures.append(line.text))
    page.goto(url)
    return page


def keep_picture(page: Any, name: str) -> None:
    """Saves a screenshot in the folder that SCREENSHOTS names."""
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


def fits(page: Any) -> bool:
    """Returns whether the page is no wider than the screen."""
    return page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.parametrize("size", SIZES)
def test_the_explorer_shows_the_selection(run, browser, size):
    path = run.folder / "arms" / "rod" / "curriculum.rod"
    data = explore(path)
    assert data is not None
    page = open_page(browser, size, (run.folder / "report" / "curriculum.html").as_uri())
    keep_picture(page, f"explorer_{size}")
    index = 7
    pool = data["pools"][index]
    page.select_option("#step", index=index)
    for words in ("", "web"):
        page.fill("#find", words)
        mine = [c for c in pool["candidates"] if words in data["sources"][c[4]][1]]
        rows = page.locator("#pool tbody tr")
        assert rows.count() == len(mine)
        first = rows.first.inner_text()
        assert f"{mine[0][3]:.3f}".replace("-", "\N{MINUS SIGN}") in first
        assert f"The text of block {mine[0][0]} <b>as it is</b>" in first
        assert page.locator("#pool tr.chosen").count() == sum(c[5] for c in mine)
    shared = page.url
    assert f"step={pool['step']}&find=web" in shared
    page.goto("about:blank")
    page.goto(shared)  # a link shows the same
    assert page.input_value("#find") == "web"
    assert page.inner_text("#title").startswith(f"Step {pool['step']}: ")
    assert fits(page) and page.failures == []
    keep_picture(page, f"explorer_of_a_source_{size}")
    page.close()


@pytest.mark.parametrize("size", SIZES)
def test_the_page_during_a_run_leads_to_the_explorer(run, browser, size):
    page = open_page(browser, size, (run.folder / "report" / "index.html").as_uri())
    assert "Not done yet: fixed 32 %." in page.inner_text(".standing")
    assert page.locator("progress").evaluate_all("all => all.map(one => one.value)").count(4) == 1
    page.wait_for_selector("#curve-loss-0 svg.marks")
    page.check("#log-y")
    page.click("#curve-loss-0 .role-legend-symbol path >> nth=0", force=True)
    page.wait_for_selector("#curve-sources-0 svg.marks")
    assert fits(page) and page.failures == []
    keep_picture(page, f"during_a_run_{size}")
    assert page.locator("nav a").count() == page.locator("section[id] > h2").count()
    page.click("a[href='curriculum.html']")
    page.wait_for_selector("tr.chosen")
    assert page.title() == "Curriculum of german_smollm2_135m_debian, RoD"
    page.close()


def test_a_served_page_reloads_itself_and_shows_later_steps(tmp_path, browser):
    run = tmp_path / "german_smollm2_135m_debian"
    write_partial(run / "arms" / "rod.partial", 4, 10)
    build_report(run, arms=["rod"])
    server = serve(run / "report", port=0, every=1)
    page = open_page(browser, "desktop", f"http://127.0.0.1:{server.server_address[1]}/")
    assert "4 of 10" in page.inner_text(".standing")
    keep_picture(page, "under_way_desktop")
    metrics = run / "arms" / "rod.partial" / "metrics.jsonl"
    rows = [json.dumps({"step": step, "train/loss": 3.0}) for step in range(7)]
    metrics.write_text("\n".join(rows) + "\n")
    build_report(run, arms=["rod"])
    page.wait_for_function("document.querySelector('.standing').innerText.includes('7 of 10')")
    server.shutdown()
    page.close()
