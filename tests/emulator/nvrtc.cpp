// Stands in for NVIDIA's NVRTC: compiles kernels by g++ for the emulator.
//
// Headers that the emulator has, too (EMULATOR_HEADERS: where they lie), are taken from there. What comes out runs in the stand-in for
// the driver (driver.cpp) alone, PTX too. Needs g++ at run time; keeps nothing, compiles in $TMPDIR.
#include "image.h"
#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <utility>
#include <vector>
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

namespace {

enum Result {
    SUCCESS = 0,
    OUT_OF_MEMORY = 1,
    PROGRAM_CREATION_FAILURE = 2,
    INVALID_INPUT = 3,
    INVALID_PROGRAM = 4,
    INVALID_OPTION = 5,
    COMPILATION = 6,
    BUILTIN_OPERATION_FAILURE = 7,
    INTERNAL_ERROR = 11,
};

const int CARDS[] = {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};

struct Target {
    int card;
    image::Kind kind;
};

struct Program {
    std::string source, name, log, image;
    image::Kind kind;
    std::vector<std::pair<std::string, std::string>> headers;
};

// What NVRTC takes and means nothing here.
const char* const IGNORED[] = {
    "--std=", "-std=", "-default-device", "--device-as-default-execution-space", "--ptxas-options", "-lineinfo", "--generate-line-info",
    "-G", "--device-debug", "--use_fast_math", "-use_fast_math", "--fmad=", "-fmad=", "--ftz=", "-ftz=", "--prec-div=", "--prec-sqrt=",
    "--maxrregcount=", "--restrict", "-restrict", "--extra-device-vectorization", "--diag-suppress=", "--disable-warnings", "-w",
    "--split-compile=", "--minimal",
};

bool begins(const std::string& text, const char* with) {
    return text.compare(0, std::strlen(with), with) == 0;
}

std::string read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
}

bool write(const std::string& path, const std::string& text) {
    std::ofstream file(path, std::ios::binary);
    file << text;
    return bool(file.flush());
}

// What `sm_90a` or `compute_90` stands for; its card is 0 where it stands for nothing.
Target target_of(const std::string& text) {
    Target target{0, begins(text, "compute_") ? image::PTX : image::CUBIN};
    if (!begins(text, "compute_") && !begins(text, "sm_")) return target;
    char* end;
    long number = std::strtol(text.c_str() + text.find('_') + 1, &end, 10);
    if (std::strcmp(end, "a") == 0 && target.kind == image::CUBIN && number >= 90)
        target.kind = image::EXACT;
    else if (*end)
        return target;
    if (std::count(std::begin(CARDS), std::end(CARDS), number)) target.card = (int)number;
    return target;
}

// Names of the functions that are `extern "C" __global__`.
std::vector<std::string> kernels(const std::string& source) {
    const std::string mark = "extern \"C\" __global__";
    std::vector<std::string> names;
    for (size_t at = source.find(mark); at != std::string::npos; at = source.find(mark, at)) {
        at += mark.size();
        for (bool found = false; !found;) {
            at = source.find_first_not_of(" \t\n", at);
            size_t end = at;
            while (end < source.size() && (std::isalnum((unsigned char)source[end]) || source[end] == '_')) end++;
            if (at == std::string::npos || end == at) break;
            std::string word = source.substr(at, end - at);
            at = end;
            if (word == "__launch_bounds__") {
                int depth = 0;
                do {
                    depth += source[at] == '(';
                    depth -= source[at] == ')';
                } while (++at < source.size() && depth > 0);
            } else if (word != "void") {
                names.push_back(word);
                found = true;
            }
        }
    }
    return names;
}

// Runs g++ in a folder and returns whether it was content; what it says goes to the log.
bool compile(const std::string& folder, const std::vector<std::string>& arguments, std::string& log) {
    std::vector<char*> words;
    for (const std::string& argument : arguments) words.push_back(const_cast<char*>(argument.c_str()));
    words.push_back(nullptr);
    std::string said = folder + "/log";
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addchdir_np(&actions, folder.c_str());
    posix_spawn_file_actions_addopen(&actions, 2, said.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0600);
    posix_spawn_file_actions_adddup2(&actions, 2, 1);
    pid_t child;
    int failed = posix_spawnp(&child, "g++", &actions, nullptr, words.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    if (failed) {
        log = std::string("g++: ") + std::strerror(failed) + "\n";
        return false;
    }
    int status;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    log = read(said);
    const std::string headers = std::string(EMULATOR_HEADERS) + "/";
    for (size_t at; (at = log.find(headers)) != std::string::npos;) log.erase(at, headers.size());
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// Compiles the program in a folder of its own, which is there and empty.
Result build(Program& program, const std::string& folder, Target target, const std::vector<std::string>& macros) {
    // Macros stand in the source: the precompiled header is for compilers that are given none.
    std::string source = "#define __CUDA_ARCH__ " + std::to_string(target.card * 10) + "\n";
    if (target.kind == image::EXACT) source += "#define __CUDA_ARCH_FEAT_SM" + std::to_string(target.card) + "_ALL 1\n";
    for (const std::string& macro : macros) {
        size_t end = std::min(macro.find('='), macro.size());
        source += "#define " + macro.substr(0, end) + " " + (end < macro.size() ? macro.substr(end + 1) : "1") + "\n";
    }
    source += "#line 1 \"" + program.name + "\"\n" + program.source + "\n";
    for (const std::string& name : kernels(program.source))
        source += "extern \"C\" __attribute__((visibility(\"default\"))) void* emulator_kernel_" + name +
                  "(void** arguments) { return emulator::with_arguments(" + name + ", arguments); }\n";
    bool written = write(folder + "/" + program.name, source);
    for (const auto& [name, text] : program.headers)
        if (!std::filesystem::exists(std::string(EMULATOR_HEADERS) + "/" + name)) written &= write(folder + "/" + name, text);
    if (!written) return INTERNAL_ERROR;
    std::vector<std::string> arguments = {"g++", "-shared", "-Wl,-z,defs"};
    std::istringstream flags(EMULATOR_FLAGS);
    for (std::string flag; flags >> flag;) arguments.push_back(flag);
    arguments.insert(arguments.end(), {"-I", EMULATOR_BUILT, "-I", EMULATOR_HEADERS, "-include", "emulator.h"});
    arguments.insert(arguments.end(), {"-x", "c++", program.name, "-o", "object"});
    if (!compile(folder, arguments, program.log)) return COMPILATION;
    std::string object = read(folder + "/object");
    image::Header header{{}, EMULATOR_STAMP, (uint32_t)target.card, target.kind, object.size(), image::sum(object.data(), object.size())};
    std::memcpy(header.magic, image::MAGIC, sizeof header.magic);
    program.image.assign((const char*)&header, sizeof header);
    program.image += object;
    program.kind = target.kind;
    return SUCCESS;
}

}  // namespace

extern "C" {

Result nvrtcVersion(int* major, int* minor) {
    *major = 13;
    *minor = 0;
    return SUCCESS;
}

const char* nvrtcGetErrorString(Result result) {
    switch (result) {
    case SUCCESS: return "NVRTC_SUCCESS";
    case OUT_OF_MEMORY: return "NVRTC_ERROR_OUT_OF_MEMORY";
    case PROGRAM_CREATION_FAILURE: return "NVRTC_ERROR_PROGRAM_CREATION_FAILURE";
    case INVALID_INPUT: return "NVRTC_ERROR_INVALID_INPUT";
    case INVALID_PROGRAM: return "NVRTC_ERROR_INVALID_PROGRAM";
    case INVALID_OPTION: return "NVRTC_ERROR_INVALID_OPTION";
    case COMPILATION: return "NVRTC_ERROR_COMPILATION";
    case BUILTIN_OPERATION_FAILURE: return "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE";
    case INTERNAL_ERROR: return "NVRTC_ERROR_INTERNAL_ERROR";
    default: return "NVRTC_ERROR unknown";
    }
}

Result nvrtcGetNumSupportedArchs(int* count) {
    *count = std::size(CARDS);
    return SUCCESS;
}

Result nvrtcGetSupportedArchs(int* cards) {
    std::copy(std::begin(CARDS), std::end(CARDS), cards);
    return SUCCESS;
}

Result nvrtcCreateProgram(Program** program, const char* source, const char* name, int count, const char* const* headers,
                          const char* const* names) {
    if (!program || !source || count < 0 || (count > 0 && (!headers || !names))) return INVALID_INPUT;
    Program* made = new Program{source, name && *name ? std::filesystem::path(name).filename() : "default_program", {}, {}, {}, {}};
    for (int i = 0; i < count; i++) made->headers.emplace_back(names[i], headers[i]);
    *program = made;
    return SUCCESS;
}

Result nvrtcDestroyProgram(Program** program) {
    if (!program || !*program) return INVALID_PROGRAM;
    delete *program;
    *program = nullptr;
    return SUCCESS;
}

Result nvrtcCompileProgram(Program* program, int count, const char* const* options) {
    if (!program) return INVALID_PROGRAM;
    Target target{75, image::PTX};
    std::vector<std::string> macros;
    program->image.clear();
    for (int i = 0; i < count; i++) {
        std::string option = options[i];
        bool known = false;
        for (const char* arch : {"--gpu-architecture=", "-arch="})
            if (begins(option, arch)) {
                target = target_of(option.substr(std::strlen(arch)));
                known = target.card > 0;
            }
        for (const char* macro : {"--define-macro=", "-D"})
            if (begins(option, macro)) {
                macros.push_back(option.substr(std::strlen(macro)));
                known = true;
            }
        for (const char* ignored : IGNORED) known |= begins(option, ignored);
        if (!known) {
            program->log = "nvrtc: error: invalid option or value: " + option + "\n";
            return INVALID_OPTION;
        }
    }
    const char* base = std::getenv("TMPDIR");
    std::string folder = std::string(base && *base ? base : "/tmp") + "/emulator-XXXXXX";
    if (!mkdtemp(folder.data())) {
        program->log = folder + ": " + std::strerror(errno) + "\n";
        return INTERNAL_ERROR;
    }
    Result result = build(*program, folder, target, macros);
    std::error_code ignored;
    std::filesystem::remove_all(folder, ignored);
    return result;
}

Result nvrtcGetProgramLogSize(Program* program, size_t* size) {
    if (!program) return INVALID_PROGRAM;
    *size = program->log.size() + 1;
    return SUCCESS;
}

Result nvrtcGetProgramLog(Program* program, char* log) {
    if (!program) return INVALID_PROGRAM;
    std::memcpy(log, program->log.c_str(), program->log.size() + 1);
    return SUCCESS;
}

// 0 where PTX was asked for: code for a virtual card is for none.
Result nvrtcGetCUBINSize(Program* program, size_t* size) {
    if (!program || program->image.empty()) return INVALID_PROGRAM;
    *size = program->kind == image::PTX ? 0 : program->image.size();
    return SUCCESS;
}

Result nvrtcGetCUBIN(Program* program, char* image) {
    if (!program || program->image.empty() || program->kind == image::PTX) return INVALID_PROGRAM;
    std::memcpy(image, program->image.data(), program->image.size());
    return SUCCESS;
}

Result nvrtcGetPTXSize(Program* program, size_t* size) {
    if (!program || program->image.empty() || program->kind != image::PTX) return INVALID_PROGRAM;
    *size = program->image.size();
    return SUCCESS;
}

Result nvrtcGetPTX(Program* program, char* image) {
    if (!program || program->image.empty() || program->kind != image::PTX) return INVALID_PROGRAM;
    std::memcpy(image, program->image.data(), program->image.size());
    return SUCCESS;
}

}  // extern "C"
