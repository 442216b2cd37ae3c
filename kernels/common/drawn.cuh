// What sample.cu leaves of each row of logits, and embed.cu takes its tokens from.
#pragma once
#include "types.cuh"

struct Drawn {
    u32 token, status;
    // The token's raw logit; of all raw logits the largest, and the sum of exp(logit - largest).
    float logit, largest, total;
};

// Of a token: that it is not an id, but a row whose drawn token it is.
#define IS_DRAWN 0x80000000u
