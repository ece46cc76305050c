"""The programs of the Metal proof: where they are, and what to say when they are not there."""

import ctypes.util
import os
import pathlib
import shutil
import subprocess

import pytest

ICD_DIRS = ("/usr/share/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/etc/vulkan/icd.d")
PROGRAMS = {"spirv-val": "spirv-tools", "spirv-cross": "spirv-cross", "g++": "g++"}  # and their Debian packages


class ToolError(Exception):
    """A program found something wrong; the text is what it said."""


def llvmpipe_icd():
    """Driver manifest of Mesa's software Vulkan, or None."""
    preset = os.environ.get("VK_DRIVER_FILES", "")
    if "lvp" in preset:
        return preset
    found = [str(path) for folder in ICD_DIRS for path in sorted(pathlib.Path(folder).glob("lvp_icd*.json"))]
    return found[0] if found else None


def missing():
    """Names of what is not installed here, each with the Debian package that brings it."""
    lacks = [f"{program} (package {package})" for program, package in PROGRAMS.items() if not shutil.which(program)]
    if llvmpipe_icd() is None:
        lacks.append("llvmpipe (package mesa-vulkan-drivers)")
    if ctypes.util.find_library("vulkan") is None:
        lacks.append("the Vulkan loader (package libvulkan1)")
    return lacks


def require_all():
    """Skip the test when a tool is missing; in CI that is a failure."""
    if lacks := missing():
        reason = "the Metal proof needs " + ", ".join(lacks)
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(f"{reason}: in CI nothing may be skipped")
        pytest.skip(reason)


def call(*command, timeout=300, cwd=None, env=None):
    """Run a program and return what it printed; raise ToolError with its words when it fails."""
    command = [str(word) for word in command]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=cwd, env=env, check=False)
    except subprocess.TimeoutExpired:
        raise ToolError(f"{command[0]} did not end within {timeout} s") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise ToolError(f"{pathlib.Path(command[0]).name} failed ({done.returncode}): {said[-3000:]}")
    return done.stdout
