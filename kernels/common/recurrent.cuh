// Shared by recurrent.cu and keep_inputs.cu: the sequences whose states a step updates.
#pragma once
#include "types.cuh"

// `Step::upload` of src/device/cuda/step.rs.
struct Sequence {
    // Its tokens of the step.
    u32 first_token, tokens;
    // Where its state is.
    u32 slot;
    // Whether it has no earlier tokens: then its state is zero, whatever the slot holds.
    u32 begins;
};
