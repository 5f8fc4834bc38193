"""A stranger's chat template is rendered in a process of its own, as `transformers` renders it. The
kernel ends it when it takes too much."""

from __future__ import annotations

import os
import resource
from datetime import datetime
from pathlib import Path

import pytest
from families import FAMILIES, packaged_templates, tokenizer_of

from agent_r1.chat import renderer
from agent_r1.chat.renderer import Renderer, RenderError, renderer_of
from agent_r1.chat.template import Template

NOW = datetime(2026, 11, 29, 8, 30)
MESSAGES = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "Where is Oslo? <b>&amp;</b> \u2028 \ud800"},
    {"role": "assistant", "content": "Norway."},
    {"role": "user", "content": "And Rome?"},
]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(renderer, "RENDER_S", 1)
    monkeypatch.setattr(renderer, "MEMORY_BYTES", 2**28)


@pytest.mark.parametrize("name", sorted(packaged_templates("trl"))[:8])
def test_a_template_of_a_package_reads_as_with_transformers(name):
    source = packaged_templates("trl")[name]
    tokenizer = tokenizer_of(next(iter(FAMILIES.values())), source)
    template = Template(tokenizer)
    messages = MESSAGES[1:]  # some refuse a system message
    expected = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert template.render(messages) == expected


def test_generation_blocks_json_and_time_are_those_of_transformers():
    source = (
        "{% for m in messages %}{% generation %}{{ m | tojson(indent=1) }}{% endgeneration %}"
        "{% endfor %}{{ strftime_now('%d %B %Y') }}"
    )
    tokenizer = tokenizer_of(next(iter(FAMILIES.values())), source)
    expected = tokenizer.apply_chat_template(MESSAGES, tokenize=False, strftime_now=NOW.strftime)
    worker = Renderer(source, NOW)
    assert worker.render(messages=MESSAGES) == expected
    worker.close()


HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "words": "{{ lipsum(n=3000000) }}",
    "format": "{{ strftime_now('%s' * 300000000) }}",
    "width": "{{ '%2000000000d' % 1 }}",
    "slices": "{{ range(9) | slice(2000000000) | list }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "repeats": "{{ 'ab' * 2000000000 }}",
    "expressions": "{{ 1 }}" * 300_000,
    "parentheses": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "negations": "{{ " + "not " * 100_000 + "1 }}",
    "lists": "{{ " + "[" * 100_000 + "]" * 100_000 + " }}",
    "sums": "{{ " + "1 + " * 100_000 + "1 }}",
    "comments": "{#" * 300_000,
    "long text": "{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}",
}


@pytest.mark.slow
@pytest.mark.parametrize("attack", HOSTILE.values(), ids=HOSTILE)
def test_what_takes_too_much_ends_in_one_line(quick, attack):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    worker = Renderer(attack + "{{ messages[0].content }}", NOW)
    worker.only_copies()  # False, or an end of the process
    again = Renderer(attack + "{{ messages[0].content }}", NOW)
    try:
        text = again.render(messages=MESSAGES)
        assert len(text) < renderer.TEXT_BYTES
    except RenderError as error:
        assert "\n" not in str(error)
    worker.close()
    again.close()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 10  # two processes of at most a second, and starts


def test_the_process_has_neither_our_packages_nor_our_environment(monkeypatch):
    monkeypatch.setenv("SECRET", "sk-1")
    worker = Renderer("{{ messages[0].content }}", NOW)
    assert worker.render(messages=MESSAGES) == MESSAGES[0]["content"]
    place = Path(f"/proc/{worker._process.pid}")
    if not place.exists():
        pytest.skip("this system has no /proc")
    assert b"SECRET" not in (place / "environ").read_bytes()
    assert os.readlink(place / "cwd") == "/"
    maps = (place / "maps").read_text()
    assert not any(name in maps for name in ("torch", "numpy", "tokenizers"))
    worker.close()


def test_a_template_is_started_once_and_again_after_its_end():
    first = renderer_of("{{ messages | length }}", NOW)
    assert renderer_of("{{ messages | length }}", NOW) is first
    first.close()
    second = renderer_of("{{ messages | length }}", NOW)
    assert second is not first and second.render(messages=MESSAGES) == "4"


def test_a_template_that_ends_its_processes_is_given_up():
    """Each of a dozen renderings would cost the seconds that a template may take."""
    template = "{{ messages | length }} given up"
    for _ in range(renderer.MOST_ENDS):
        process = renderer_of(template, NOW)
        process._process.kill()
        with pytest.raises(RenderError, match="its process ended: "):
            process.render(messages=[])
    for _ in range(3):
        process = renderer_of(template, NOW)
        with pytest.raises(RenderError, match="its process ended: "):
            process.render(messages=[])
        assert process.is_usable, "it was not asked"
    assert not renderer_of(template, NOW).only_copies()
    assert renderer_of("{{ messages | length }} others", NOW).render(messages=[]) == "0 others"


def test_a_child_process_starts_its_own():
    """Two processes that read one pipe would take each other's answers."""
    first = renderer_of("{{ messages[0].content }}", NOW)
    pid = os.fork()
    if pid == 0:
        usable = renderer_of("{{ messages[0].content }}", NOW) is not first
        os._exit(0 if usable else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert first.render(messages=MESSAGES) == MESSAGES[0]["content"]


def test_few_processes_are_kept():
    workers = [renderer_of(f"{{{{ {number} }}}}", NOW) for number in range(6)]
    alive = [worker for worker in workers if worker.is_usable]
    assert alive == workers[-renderer.MOST_PROCESSES :]


def test_jinja_is_new_enough_to_be_a_border():
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert '"jinja2>=3.1.6"' in text
