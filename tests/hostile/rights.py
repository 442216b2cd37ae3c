"""A program that has more rights than who starts it, and who starts it with libraries of their own.

Root makes copies of the program, one of its own with the set-user-ID bit and one with a file capability, and somebody without rights starts them.
"""

import os
import shutil
import struct
import subprocess

import case
from case import DONE, FAILURE, REFUSED, Case, NotShown, Step

NOBODY = 65534
AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
# To read and write whatever the files' modes say.
DAC_OVERRIDE = 1
LIBRARY = """#include <fcntl.h>
__attribute__((constructor)) static void begin(void) { open("%s", O_CREAT | O_WRONLY, 0600); }
"""
ARGV = ["doctor", "--device", "cuda:0"]


def set_user_id(path):
    path.chmod(0o4755)


def capability(path):
    path.chmod(0o755)
    # Version 2, effective at once: see linux/capability.h.
    os.setxattr(path, "security.capability", struct.pack("<5I", 0x02000001, 1 << DAC_OVERRIDE, 0, 0, 0))


def probed(folder, give):
    """Does a copy of `cat` that is given these rights read for nobody what is root's alone?"""
    copy, secret = folder / "cat", folder / "secret"
    shutil.copy(shutil.which("cat"), copy)
    secret.write_text("root's")
    secret.chmod(0o600)
    give(copy)
    done = subprocess.run([*AS_NOBODY, "./cat", "secret"], cwd=folder, capture_output=True, text=True)
    return done.stdout == "root's"


def copies(give):
    def make(folder):
        folder.chmod(0o755)
        if os.getuid() != 0:
            raise NotShown("only root can give a copy of the program more rights")
        compiler = shutil.which("cc") or shutil.which("gcc")
        if not compiler or not shutil.which("setpriv"):
            raise NotShown("it needs `cc` and `setpriv`")
        try:
            gains = probed(folder, give)
        except OSError as error:
            raise NotShown(f"no file can be given such rights here: {error}") from error
        if not gains:
            raise NotShown("programs gain no rights here (mounted with nosuid, or no_new_privs is set)")
        libraries = folder / "libraries"
        libraries.mkdir()
        (folder / "library.c").write_text(LIBRARY % (folder / "loaded"))
        subprocess.run([compiler, "-shared", "-fPIC", "-o", libraries / "libcuda.so.1", folder / "library.c"], check=True)
        shutil.copy(case.PROGRAM, folder / "gristmill")
        give(folder / "gristmill")
    return make


def was_loaded(folder):
    assert (folder / "loaded").exists(), "who has no more rights than the program is not given the library either: nothing is shown"
    (folder / "loaded").unlink()


def not_loaded(folder):
    assert not (folder / "loaded").exists(), "it ran what its environment named, with rights that who started it does not have"


def libraries(give):
    plain = Step(ARGV, (REFUSED, FAILURE, DONE))
    raised = Step(ARGV, (REFUSED, FAILURE, DONE), ("`GRISTMILL_CUDA_LIBRARIES` is ignored",), through=(*AS_NOBODY, "./gristmill"),
                  runs_copy=True, before=was_loaded)

    def make(folder):
        copies(give)(folder)
        for step in (plain, raised):
            step.env["GRISTMILL_CUDA_LIBRARIES"] = str(folder / "libraries")
    return Case(f"libraries-{give.__name__}", make, [plain, raised], not_loaded)


def cases():
    yield libraries(set_user_id)
    yield libraries(capability)
