"""One handler: plain lines on standard error, as many as were asked for, and no line ends a program."""

import logging
import os
import subprocess
import sys

import pytest

from isthmus import log

LOGGER = logging.getLogger("isthmus.tests")


@pytest.fixture(autouse=True)
def no_handler(monkeypatch):
    monkeypatch.setattr(logging.getLogger("isthmus"), "handlers", [])


def write_all() -> None:
    LOGGER.debug("a detail")
    LOGGER.info("a line of %s", "news")
    LOGGER.warning("a warning")
    LOGGER.error("wrong")


ALL = ["isthmus.tests: a detail", "a line of news", "a warning", "error: wrong"]


@pytest.mark.parametrize(("options", "expected"), [({}, ALL[1:]), ({"verbose": True}, ALL), ({"quiet": True}, ALL[2:])])
def test_lines_are_plain_and_as_many_as_were_asked_for(capsys, options, expected):
    log.set_up(**options)
    write_all()
    assert capsys.readouterr().err.splitlines() == expected


def test_setting_up_twice_writes_once(capsys):
    log.set_up()
    log.set_up(quiet=True)
    write_all()
    assert capsys.readouterr().err.splitlines() == ALL[2:]


@pytest.mark.parametrize("options", [{}, {"verbose": True}, {"quiet": True}])
def test_another_process_writes_as_much(options):
    log.set_up(**options)
    assert log.options() == [f"--{name}" for name in options]


def test_a_log_on_a_full_disk_ends_nothing(monkeypatch):
    log.set_up()
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        LOGGER.warning("a line")
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


@pytest.mark.processes
@pytest.mark.parametrize("arguments", [["--quiet", "launch"], ["launch", "--verbose"]])
def test_the_options_may_stand_before_and_behind_a_command(arguments):
    command = [sys.executable, "-m", "isthmus", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert done.stderr == "error: Missing argument 'CONFIG'; see isthmus --help\n"
