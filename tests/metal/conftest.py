"""Exports every case once, in processes of their own, and prints the gate's table at the end of the run."""

import pytest

from . import cases, export, gate, mistakes, samples, tools

TABLE = pytest.StashKey[dict]()


class Exports:
    """Folder of each exported case, and the gate's reports of those it has checked."""

    def __init__(self, folder, reports):
        self.folder, self.reports = folder, reports

    def case(self, name):
        return self.folder / name

    def check(self, name):
        if name not in self.reports:
            self.reports[name] = gate.check(self.case(name))
        return self.reports[name]


def _exported(request, tmp_path_factory, registry):
    tools.require_all()
    folder = tmp_path_factory.mktemp("metal")
    export.export(registry, folder)
    return Exports(folder, request.config.stash.setdefault(TABLE, {}))


@pytest.fixture(scope="session")
def exported_samples(request, tmp_path_factory):
    return _exported(request, tmp_path_factory, samples.CASES)


@pytest.fixture(scope="session")
def exported_mistakes(request, tmp_path_factory):
    exports = _exported(request, tmp_path_factory, mistakes.CASES)
    exports.reports = {}  # not for the table
    return exports


@pytest.fixture(scope="session")
def exported_package(request, tmp_path_factory):
    return _exported(request, tmp_path_factory, cases.CASES)


def pytest_terminal_summary(terminalreporter, config):
    reports = [report for checked in config.stash.get(TABLE, {}).values() for report in checked]
    if reports:
        terminalreporter.write_sep("-", "Metal gate")
        terminalreporter.write_line(gate.table(reports))
