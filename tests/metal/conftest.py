"""Exports every case once, in processes of their own, runs it ahead of its test, and prints the gate's table."""

import concurrent.futures
import os

import pytest

from . import cases, export, gate, mistakes, run, samples, tools

TABLE = pytest.StashKey[list]()


class Exports:
    """Exported cases: their folders, their gate reports, and their runs, which have begun before a test asks."""

    def __init__(self, folder, names, wanted):
        self.folder = folder
        self.names = names
        self.reports = {}
        self._pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
        self._runs = {key: self._pool.submit(run.check, self.case(key[0]), key[1]) for key in wanted}

    def case(self, name):
        return self.folder / name

    def check(self, name):
        """Reports of the gate."""
        if name not in self.reports:
            self.reports[name] = gate.check(self.case(name))
        return self.reports[name]

    def run(self, name, mode):
        """Wait for a case's run; raises what was wrong with it."""
        self._runs[name, mode].result()


def _exported(request, tmp_path_factory, registry, fixture):
    tools.require_all()
    folder = tmp_path_factory.mktemp("metal")
    items = [item for item in request.session.items if fixture in item.fixturenames and hasattr(item, "callspec")]
    parameters = [item.callspec.params for item in items]
    names = {case.name for case in registry if any(p["name"] == case.name for p in parameters)}
    export.export([case for case in registry if case.name in names], folder)
    return Exports(folder, names, [(p["name"], p["mode"]) for p in parameters if "mode" in p])


@pytest.fixture(scope="session")
def exported_samples(request, tmp_path_factory):
    exports = _exported(request, tmp_path_factory, samples.CASES, "exported_samples")
    yield exports
    request.config.stash.setdefault(TABLE, []).extend(exports.reports.values())


@pytest.fixture(scope="session")
def exported_package(request, tmp_path_factory):
    exports = _exported(request, tmp_path_factory, cases.CASES, "exported_package")
    yield exports
    request.config.stash.setdefault(TABLE, []).extend(exports.reports.values())


@pytest.fixture(scope="session")
def exported_mistakes(request, tmp_path_factory):
    return _exported(request, tmp_path_factory, mistakes.CASES, "exported_mistakes")


def pytest_terminal_summary(terminalreporter, config):
    if checked := config.stash.get(TABLE, []):
        terminalreporter.write_sep("-", "Metal gate")
        terminalreporter.write_line(gate.table([report for reports in checked for report in reports]))
