#!/usr/bin/env python3
"""Uses the dashboard's page in Chromium, as a person does: over `gristmill serve`, over a folder of outputs, and over a mock.

    .venv/bin/python tests/serve/browser.py PROGRAM [--only CASE] [--screenshots]

Installs Playwright and axe into `.browser/` of the checkout, and uses the Chromium of the system (`apt-get install chromium`). No part of
the check, since a browser is larger than everything else that the check installs. The last line counts the cases. With `--screenshots`, it writes
the pictures of docs/dashboard.md.
"""

import argparse
import contextlib
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

from dashboard import dashboard, job_file, run_program
from dashboard_mock import Mock
from run import ROOT, request, service, submit, tickets, until, wait

BROWSER = ROOT / ".browser"
PACKAGES = ["playwright==1.65.2", "axe-playwright-python==0.1.8"]
WIDE, PHONE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}, {"width": 360, "height": 780}
OVERFLOW = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
HOSTILE = "<img src=x onerror='document.title=1'>\u202egnp.exe "
KEY = "sk-browser"


def install():
    if not BROWSER.exists():
        subprocess.run([sys.executable, "-m", "venv", BROWSER], check=True)
        subprocess.run([BROWSER / "bin/pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES], check=True)
    sys.path += [str(path) for path in BROWSER.glob("lib/python*/site-packages")]


@contextlib.contextmanager
def pages():
    """Makes pages of a browser; each reports what goes wrong in it at the end."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert chromium, "there is no Chromium: apt-get install chromium"
    troubles = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])

        def page(size=WIDE, scheme="light"):
            context = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce", device_scale_factor=1)
            one = context.new_page()
            one.set_default_timeout(20_000)
            one.on("pageerror", lambda error: troubles.append(str(error)))
            # Refused requests are part of the cases. Anything else that the browser complains of is a defect.
            one.on("console", lambda line: line.type == "error" and "Failed to load resource" not in line.text and troubles.append(line.text))
            one.on("request", lambda sent: troubles.append(f"a request to {sent.url}") if not sent.url.startswith(("http://127.0.0.1:", "data:")) else None)
            return one

        yield page
        browser.close()
    assert not troubles, troubles


def check_access(page, where):
    """axe finds nothing, whatever its weight."""
    from axe_playwright_python.sync_playwright import Axe

    # The policy of the page allows no script but its own, so axe is put in by the browser's debugging interface.
    found = Axe().run(page).response["violations"]
    assert not found, (where, [(one["id"], one["impact"], [node["html"][:200] for node in one["nodes"][:3]]) for one in found])


def enter(page, url, key=KEY):
    page.goto(url)
    page.get_by_label("Key", exact=True).fill(key)
    page.get_by_role("button", name="Show jobs").click()


def percent_of(page):
    return int(page.get_by_role("progressbar", name="Rows of this job").get_attribute("aria-valuenow"))


def a_job_is_followed(program, page, args):
    """A wrong key is refused in words; the progress of a running batch moves; its failed row opens, with hostile markup as text."""
    with service(program, keys={KEY: "a"}) as one:
        client = one.client(KEY)
        page.goto(one.url)
        check_access(page, "key")
        enter(page, one.url, "sk-wrong")
        page.get_by_text("The server does not know this key").wait_for()
        enter(page, one.url)
        page.get_by_text("No jobs yet").wait_for()
        lines = [request(id, text) for id, text, _ in tickets(6_000)]
        lines[7]["body"]["messages"][1]["content"] = HOSTILE * 3_000
        batch = submit(client, lines, metadata={"name": "tickets of the night"})
        page.get_by_role("link", name="tickets of the night").click()
        assert page.evaluate("document.activeElement.id") == "title", "the heading takes the focus"
        seen = set()
        until("progress moves", lambda: seen.add(percent_of(page)) or len(seen) >= 4, 120)
        page.get_by_text("Live", exact=True).wait_for()
        page.get_by_text("tokens/s, last minute").wait_for()
        check_access(page, "a running job")
        if args.screenshots:
            time.sleep(3)
            picture(page, "wide", 900)
        wait(client, batch)
        page.get_by_text("Finished", exact=True).first.wait_for(timeout=60_000)
        assert percent_of(page) == 100
        group = page.locator(".reasons > li > details > summary")
        group.click()
        row = page.locator(".reasons .rows summary").first
        row.click()
        prompt = page.locator(".reasons .rows pre").first
        text = prompt.inner_text()
        assert "<img src=x onerror='document.title=1'>" in text and "U+202E" in text and "\u202e" not in text, text[:200]
        assert page.locator("main img").count() == 0 and "gristmill" in page.title()
        page.get_by_role("button", name="Show answers").click()
        page.get_by_text(re.compile(r"\d+ answers shown")).wait_for()
        check_access(page, "a finished job with open rows")
        return f"progress was seen at {sorted(seen)} %"


def commands_ask_first(program, page, args):
    """Cancelling asks first, can be left with Escape, and is done by keyboard alone."""
    with service(program, keys={KEY: "a"}) as one:
        client = one.client(KEY)
        batch = submit(client, [request(id, text) for id, text, _ in tickets(20_000)])
        enter(page, one.url)
        page.get_by_role("link", name=batch.id).wait_for()
        # From the page's top to the job, and on to the button, by Tab and Enter. The key is kept by the tab.
        page.reload()
        page.get_by_role("link", name=batch.id).wait_for()
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        reach(page, lambda: batch.id in (page.evaluate("document.activeElement.textContent") or ""))
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Cancel", exact=True).wait_for()
        reach(page, lambda: page.evaluate("document.activeElement.textContent") == "Cancel")
        page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog")
        dialog.get_by_text("Cancel this job?").wait_for()
        check_access(page, "a dialog")
        for _ in range(5):
            page.keyboard.press("Tab")
            assert page.evaluate("document.querySelector('dialog').contains(document.activeElement)"), "the focus stays in the dialog"
        page.keyboard.press("Escape")
        dialog.wait_for(state="detached")
        assert page.evaluate("document.activeElement.textContent") == "Cancel", "the focus is back"
        assert client.batches.retrieve(batch.id).status in ("validating", "in_progress")
        page.keyboard.press("Enter")
        reach(page, lambda: page.evaluate("document.activeElement.textContent") == "Cancel the job")
        page.keyboard.press("Enter")
        page.locator(".state").get_by_text(re.compile("Cancelling|Cancelled")).wait_for()
        assert wait(client, batch).status == "cancelled"
        page.locator(".state").get_by_text("Cancelled").wait_for()
        page.get_by_role("button", name="Cancel", exact=True).wait_for(state="detached")


def reach(page, is_there, steps=40):
    for _ in range(steps):
        if is_there():
            return
        page.keyboard.press("Tab")
    raise AssertionError("not reached by keyboard")


def a_lost_connection_is_told(program, page, args):
    """The service is killed and started again: the page says so, and goes on by itself."""
    with service(program, keys={KEY: "a"}) as one:
        client = one.client(KEY)
        batch = submit(client, [request(id, text) for id, text, _ in tickets(2_000)])
        enter(page, one.url)
        page.get_by_role("link", name=batch.id).click()
        page.get_by_text("Live", exact=True).wait_for()
        one.kill()
        page.get_by_text("The connection to the server is lost.").first.wait_for()
        page.get_by_text("Connection lost", exact=True).wait_for()
        one.start()
        page.get_by_text("Live", exact=True).wait_for(timeout=60_000)
        assert page.locator("#lost").is_hidden()
        wait(client, batch)
        page.get_by_text("Finished", exact=True).first.wait_for(timeout=60_000)


def outputs_of_a_folder(program, page, args):
    """`gristmill dashboard` over a folder, in four windows: a job is extended, another one is retried, and axe finds nothing."""
    with tempfile.TemporaryDirectory(prefix="gristmill-browser-") as folder:
        folder = pathlib.Path(folder)
        finished, going = job_file(folder, "finished", 3_000, long_rows=(3, 30, 31)), job_file(folder, "going", 4_000)
        run_program(program, "run", finished, "--quiet", exits=(3,))
        run_program(program, "submit", going, "--no-enqueue")
        with dashboard(program, folder / "out") as url:
            for size, scheme in [(WIDE, "dark"), (PHONE, "light"), (PHONE, "dark"), (WIDE, "light")]:
                one = page(size, scheme)
                one.goto(url)
                one.get_by_role("link", name="finished").wait_for()
                check_access(one, f"the list, {size['width']} {scheme}")
                assert not one.evaluate(OVERFLOW), "the page is wider than its window"
                one.get_by_role("link", name="finished").click()
                one.locator(".reasons > li > details > summary").first.click()
                one.locator(".reasons .rows summary").first.click()
                one.get_by_text("Reason", exact=True).wait_for()
                check_access(one, f"a job, {size['width']} {scheme}")
                assert not one.evaluate(OVERFLOW), "the page is wider than its window"
                if args.screenshots and (size, scheme) == (PHONE, "light"):
                    picture(one, "phone", 1500)
                if args.screenshots and (size, scheme) == (WIDE, "dark"):
                    picture(one, "dark", 1400)
            one.get_by_role("link", name="All jobs").first.click()
            one.get_by_role("link", name="going").click()
            one.get_by_role("button", name="Extend").click()
            one.get_by_label("Dollars for the whole job").fill("0")
            one.get_by_role("button", name="Set the limit").click()
            assert one.get_by_role("dialog").is_visible(), "0 is no limit"
            one.get_by_label("Dollars for the whole job").fill("25")
            one.get_by_role("button", name="Set the limit").click()
            one.get_by_text("of $25.00").wait_for()
            one.get_by_role("link", name="All jobs").first.click()
            one.get_by_role("link", name="finished").click()
            one.get_by_role("button", name="Retry").click()
            one.get_by_role("dialog").get_by_role("button", name="Retry").click()
            one.get_by_text("Running", exact=True).first.wait_for()


def jobs_of_every_state(program, page, args):
    """Jobs as a real server rarely has them, in four windows: axe finds nothing, nothing is wider than the page, and numbers that mean nothing are hidden."""
    with Mock() as mock:
        for size, scheme in [(WIDE, "light"), (PHONE, "dark"), (NARROW, "light"), (WIDE, "dark")]:
            one = page(size, scheme)
            one.goto(mock.url)
            one.get_by_role("link", name="labels of the week").wait_for()
            titles = one.locator(".jobs .name").evaluate_all("names => names.slice(0, 4).map((name) => name.scrollWidth <= name.clientWidth)")
            assert all(titles), f"short names are whole: {titles}"
            for id in [None, "5f0c1d2e3a4b5c6d7e8f", "batch_failed", "budget", "huge", "odd-name", "unknown-state", "unreadable"]:
                if id:
                    one.goto(f"{mock.url}/#/jobs/{id}")
                    one.get_by_role("progressbar", name="Rows of this job").wait_for()
                check_access(one, f"{id}, {size['width']} {scheme}")
                assert not one.evaluate(OVERFLOW), f"{id}: the page is wider than its window, {size['width']} {scheme}"
            text = one.locator("main").inner_text()
            assert "Rows are not known" in text and "its store does not answer" in text and not re.search(r"\b0\b|No row", text), text
        one.goto(f"{mock.url}/#/jobs/5f0c1d2e3a4b5c6d7e8f")
        one.get_by_text("200 open · 3 stuck").wait_for()
        assert one.locator("tr.stuck").count() == 3 and one.get_by_text("86 messages waiting").count() == 1
        assert one.get_by_text(re.compile("silent for")).count() == 1, "one worker is silent"
        one.goto(f"{mock.url}/#/jobs/short")
        one.get_by_text("Too few measurements for a chart.").wait_for()
        one.goto(f"{mock.url}/#/jobs/odd-name")
        one.locator(".notice .escape").first.wait_for()
        assert "\u202e" not in one.locator("main").inner_text() and one.locator("main img").count() == 0
        one.goto(mock.url)
        one.get_by_role("button", name="Show older jobs").click()
        until("older jobs show", lambda: one.locator(".jobs tbody tr").count() == 120, 20)


def updates_leave_the_reader_alone(program, page, args):
    """While events arrive, what is open stays open, the focus stays, little is said, and the page is quick with 200 shards."""
    with Mock() as mock:
        page.goto(f"{mock.url}/#/jobs/5f0c1d2e3a4b5c6d7e8f")
        page.get_by_text("Show all 200").click()
        page.locator(".reasons > li > details > summary").first.click()
        row = page.locator(".reasons .rows summary").first
        row.click()
        page.locator(".reasons .rows pre").first.wait_for()
        row.focus()
        page.evaluate("""() => {
            window.said = 0; window.slow = [];
            new MutationObserver(() => { said += document.getElementById("says").textContent ? 1 : 0; })
                .observe(document.getElementById("says"), { childList: true, characterData: true, subtree: true });
            new PerformanceObserver((list) => slow.push(...list.getEntries().map((one) => one.duration))).observe({ entryTypes: ["longtask"] });
        }""")
        first, before = mock.server.events_sent, percent_of(page)
        until("events arrive", lambda: mock.server.events_sent - first >= 20, 60)
        until("progress moves", lambda: percent_of(page) != before, 30)
        assert page.evaluate("document.activeElement.closest('.reasons .rows') !== null"), "the focus stays"
        assert page.locator(".reasons .rows pre").first.is_visible()
        assert page.get_by_role("table", name="Open shards").locator("tbody tr").count() == 200, "each shard has one line"
        said, slow = page.evaluate("[said, Math.max(0, ...slow)]")
        assert said <= 2, f"{said} announcements in 20 events"
        assert slow < 1_000, f"an update took {slow} ms"
        return f"the longest update took {slow:.0f} ms"


def refusals_are_told(program, page, args):
    """What the server refuses is told in the dialog, in plain words; so is a job that does not exist, and a text that is hidden."""
    with Mock(key=KEY) as mock:
        page.goto(mock.url)
        page.get_by_role("button", name="Show jobs").wait_for()
        enter(page, mock.url)
        words = {"409": "This is not possible now", "403": "This key may not do that", "500": "The server made a mistake"}
        for status, told in words.items():
            page.goto(f"{mock.url}/#/jobs/answers-{status}")
            page.get_by_role("heading", name=f"answers-{status}").wait_for()
            page.get_by_role("button", name="Cancel", exact=True).click()
            dialog = page.get_by_role("dialog")
            dialog.get_by_role("button", name="Cancel the job").click()
            dialog.get_by_text(f"{told}: this job refuses to cancel").wait_for()
            check_access(page, f"a refusal with {status}")
            dialog.get_by_role("button", name="Keep it running").click()
            dialog.wait_for(state="detached")
        assert mock.asked == [(f"answers-{status}", "cancel", {}) for status in words], mock.asked
        page.goto(f"{mock.url}/#/jobs/nowhere")
        page.get_by_text("There is no such job, or it belongs to another key.").wait_for()
        page.goto(f"{mock.url}/#/jobs/hidden")
        page.get_by_role("heading", name="hidden").wait_for()
        page.get_by_role("button", name="Show answers").click()
        page.get_by_text("answers shown").wait_for()
        page.locator(".rows summary").last.click()
        page.get_by_text("This server does not show it.").first.wait_for()
        # The server knows other keys after a restart: the page asks again, and says why.
        mock.stop()
        mock.key = "sk-other"
        mock.start()
        page.goto(f"{mock.url}/#/jobs/huge")
        page.get_by_text("The server no longer accepts the key of this tab.").wait_for()
        assert page.evaluate("sessionStorage.length") == 0, "the old key is forgotten"


def picture(page, name, height):
    """A picture for the docs."""
    folder = ROOT / "docs/images"
    folder.mkdir(exist_ok=True)
    page.set_viewport_size({"width": page.viewport_size["width"], "height": height})
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    path = folder / f"dashboard-{name}.png"
    page.screenshot(path=path)
    assert path.stat().st_size <= 300_000, path.stat().st_size


CASES = [
    a_job_is_followed, commands_ask_first, a_lost_connection_is_told, outputs_of_a_folder, jobs_of_every_state,
    updates_leave_the_reader_alone, refusals_are_told,
]
# These make their own pages, each in its own window.
OWN_PAGES = [outputs_of_a_folder, jobs_of_every_state]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", type=lambda path: str(pathlib.Path(path).resolve()))
    parser.add_argument("--only", action="append", choices=[case.__name__ for case in CASES])
    parser.add_argument("--screenshots", action="store_true")
    args = parser.parse_args()
    install()
    chosen = [case for case in CASES if not args.only or case.__name__ in args.only]
    for case in chosen:
        begun = time.monotonic()
        with pages() as page:
            said = case(args.program, page if case in OWN_PAGES else page(), args)
        print(f"{case.__name__}: right in {time.monotonic() - begun:.1f} s{f': {said}' if said else ''}", flush=True)
    print(f"{len(chosen)} of {len(chosen)} cases right")


if __name__ == "__main__":
    main()
