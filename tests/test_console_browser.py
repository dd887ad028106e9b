"""The console in a real browser: everything by the keyboard alone, and nothing wider than the window."""

import shutil
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright

from durable_jobs import DurableJobService, JobSpec, JobStatus
from durable_jobs.contract.models import TokenRole
from durable_jobs.dev import DevStack
from tests.conftest import Specs
from tests.http_api import calling, settings_for, token
from tests.support import claimed, dispatched, end_in, expire, running
from tests.sweeping import escalated, timed_out, uncertain

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")

INTERACTIVE = "a[href], button, input:not([type=hidden]), select, textarea, summary"
# Hidden ones, as in a closed <details>, are not reached by a mouse either.
VISIBLE = f"[...document.querySelectorAll('{INTERACTIVE}')].filter(each => each.checkVisibility())"
MARK = f"{VISIBLE}.forEach((each, n) => each.dataset.n = n) ?? {VISIBLE}.length"
FOCUSED = """() => {
    const at = document.activeElement, style = getComputedStyle(at)
    const label = at.labels && at.labels[0] ? at.labels[0].textContent : ''
    return {n: at.dataset.n ?? null, shown: style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2,
            name: (at.getAttribute('aria-label') || label || at.textContent || '').trim()}
}"""


@pytest_asyncio.fixture
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        await browser.close()


async def walk(page: Page) -> list[dict[str, Any]]:
    """Press Tab until the focus has left the page; what had the focus, in order."""
    total = await page.evaluate(MARK)
    await page.evaluate("document.activeElement.blur()")
    found = []
    for _ in range(total):
        await page.keyboard.press("Tab")
        found.append(await page.evaluate(FOCUSED))
    return found


async def tab_to(page: Page, name: str) -> None:
    for _ in range(60):
        await page.keyboard.press("Tab")
        if name in (await page.evaluate(FOCUSED))["name"]:
            return
    raise AssertionError(f"Tab does not reach {name!r}")


async def test_everything_has_its_turn_at_tab_with_a_name_and_a_visible_focus(
    browser: Browser, database_url: str, service: DurableJobService, durable_jobs_stack: DevStack, spec: Specs
) -> None:
    job = await escalated(service, spec())
    retryable = await end_in(service, await claimed(service, spec()), JobStatus.FAILED)
    await service.create_job(spec())
    settings = settings_for(database_url, durable_jobs_stack, local_organization="acme")
    async with calling(settings) as client:
        page = await browser.new_page()
        for path in ("/console", "/console/jobs", f"/console/jobs/{job.id}", f"/console/jobs/{retryable.id}"):
            await page.goto(f"{client.base_url}".rstrip("/") + path)
            turns = await walk(page)
            assert [turn["n"] for turn in turns] == [str(n) for n in range(len(turns))], path
            assert len(turns) > 2
            assert all(turn["shown"] and turn["name"] for turn in turns), (path, turns)


async def test_an_operator_signs_in_and_resolves_a_job_by_the_keyboard_alone(
    browser: Browser, database_url: str, service: DurableJobService, durable_jobs_stack: DevStack, spec: Specs
) -> None:
    job = await escalated(service, spec())
    secret = await token(service, TokenRole.OPERATOR)
    settings = settings_for(database_url, durable_jobs_stack, http_tokens="required")
    async with calling(settings) as client:
        page = await browser.new_page()
        keyboard = page.keyboard
        await page.goto(f"{client.base_url}".rstrip("/") + "/console")
        await keyboard.type(secret)  # the one field has the focus
        async with page.expect_navigation():
            await keyboard.press("Enter")
        await tab_to(page, str(job.id))
        async with page.expect_navigation():
            await keyboard.press("Enter")
        # The first of the legal actions is open: an escalated job is there to be resolved.
        await tab_to(page, "Verdict")
        await keyboard.press("f")
        await tab_to(page, "Evidence")
        await keyboard.type('{"ticket": 17, "seen": "no charge at the provider"}')
        await tab_to(page, "Your name")
        await keyboard.press("Control+a")
        await keyboard.type("Grace Hopper")
        async with page.expect_navigation():
            await keyboard.press("Enter")
        assert await page.get_by_role("status").inner_text()
    resolved = await service.get_job(job.id)
    assert resolved.status is JobStatus.FAILED
    assert resolved.reconciliation is not None
    assert resolved.reconciliation["evidence"] == {"ticket": 17, "seen": "no charge at the provider"}
    assert resolved.reconciliation["actor"].startswith("Grace Hopper")


@pytest.mark.parametrize("width", [1280, 390])
async def test_no_page_is_wider_than_the_window(
    browser: Browser,
    database_url: str,
    service: DurableJobService,
    durable_jobs_stack: DevStack,
    spec: Specs,
    width: int,
) -> None:
    """With jobs in every status, and names as long as they may be."""

    def long() -> JobSpec:
        return spec(job_type="t" * 128, idempotency_key=uuid4().hex + "k" * 223, payload={"n": "x" * 500})

    await service.create_job(long())
    claims = [await claimed(service, spec()), await running(service, spec()), await dispatched(service, spec())]
    for status in (JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.HALT_UNSAFE):
        await end_in(service, await claimed(service, long()), status)
    await end_in(service, await claimed(service, spec(max_attempts=1)), JobStatus.DEAD_LETTER)
    await expire(service, claims[0].job_id)
    shown = [(await uncertain(service, spec())).id, (await timed_out(service, long())).id]
    shown += [(await escalated(service, spec())).id, *(claim.job_id for claim in claims)]
    assert {job.status for job in (await service.list_jobs()).items} == set(JobStatus)
    settings = settings_for(database_url, durable_jobs_stack, local_organization="acme")
    async with calling(settings) as client:
        page = await browser.new_page(viewport={"width": width, "height": 900})
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        for path in ("/console", "/console/jobs", *(f"/console/jobs/{job_id}" for job_id in shown)):
            await page.goto(f"{client.base_url}".rstrip("/") + path)
            wide = await page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0, path
        assert problems == []
