//! Instruction sets of the processor, and functions that are compiled once per set.
//!
//! Results are bit-identical with all sets: lanes are independent, every multiply-add is fused (one
//! rounding), and the order of a sum is independent of the register width. Only dot products of
//! BF16 pairs have another order of additions (`bf16.rs`).

/// Instruction sets that kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    /// AVX-512 and dot products of 8-bit numbers.
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    /// AVX-512 and dot products of 8-bit numbers and of BF16.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    /// AVX-512 with both dot products, and AMX tiles: matmuls of 8-bit numbers and of BF16.
    #[cfg(target_arch = "x86_64")]
    Amx,
    /// AVX-512 F, BW, DQ, VL: 16 lanes, 32 registers.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX2, FMA, F16C: 8 lanes, 16 registers.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX2 and dot products of 8-bit numbers in 256 bits.
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    /// The instructions that every processor of the compilation target has. On x86-64 these do not
    /// include FMA, so fused multiply-adds are computed in software: correct but slow.
    Portable,
}

impl std::fmt::Display for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => "avx512-vnni",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => "avx512-bf16",
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => "amx",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => "avx-vnni",
            Isa::Portable => "portable",
        })
    }
}

impl std::str::FromStr for Isa {
    type Err = String;

    /// Parses the name of an instruction set that this processor has.
    fn from_str(name: &str) -> Result<Isa, String> {
        let sets = Isa::available();
        sets.iter().copied().find(|isa| isa.to_string() == name).ok_or_else(|| {
            let names: Vec<String> = sets.iter().map(Isa::to_string).collect();
            format!("this processor has {}", names.join(", "))
        })
    }
}

impl Isa {
    /// The set that is fastest on this processor.
    pub fn detect() -> Isa {
        let best = *Isa::available().last().unwrap_or(&Isa::Portable);
        #[cfg(target_arch = "x86_64")]
        if best == Isa::Avx512Bf16 && has_slow_bf16_pairs() {
            return Isa::Avx512Vnni;
        }
        best
    }

    /// All sets this processor has, slowest first.
    pub fn available() -> Vec<Isa> {
        let mut sets = vec![Isa::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
                sets.push(Isa::Avx2);
                if is_x86_feature_detected!("avxvnni") {
                    sets.push(Isa::AvxVnni);
                }
                if is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                {
                    sets.push(Isa::Avx512);
                    if is_x86_feature_detected!("avx512vnni") {
                        sets.push(Isa::Avx512Vnni);
                        if is_x86_feature_detected!("avx512bf16") {
                            sets.push(Isa::Avx512Bf16);
                            if super::gemm::amx::is_available() {
                                sets.push(Isa::Amx);
                            }
                        }
                    }
                }
            }
        }
        sets
    }
}

/// Whether dot products of BF16 pairs are slower than multiply-adds in F32. On a Xeon with AVX-512
/// BF16 and without AMX, they ran at 0.54 to 0.68 of the speed of F32 (`tests/kernel_speed.rs`); on
/// an AMD EPYC at about twice that speed.
#[cfg(target_arch = "x86_64")]
fn has_slow_bf16_pairs() -> bool {
    let leaf = std::arch::x86_64::__cpuid(0);
    [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).concat() == b"GenuineIntel"
}

/// Defines `fn name(isa, args..)` that runs the `#[inline(always)]` function `body(args..)`
/// compiled for `isa`.
///
/// `isa` must be `Portable` or come from [`Isa::available`], which detects the processor's
/// instructions.
macro_rules! multiversion {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) = $body:path;) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments)]
        #[allow(unsafe_code, reason = "runs instructions that the processor has")]
        $vis fn $name(isa: $crate::device::cpu::isa::Isa, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
            fn avx512($($arg: $ty),*) {
                $body($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2($($arg: $ty),*) {
                $body($($arg),*)
            }
            match isa {
                #[cfg(target_arch = "x86_64")]
                $crate::device::cpu::isa::Isa::Avx512
                | $crate::device::cpu::isa::Isa::Avx512Vnni
                | $crate::device::cpu::isa::Isa::Avx512Bf16
                | $crate::device::cpu::isa::Isa::Amx => {
                    // SAFETY: the processor has these instructions, or `isa` would not have this
                    // value.
                    unsafe { avx512($($arg),*) }
                }
                #[cfg(target_arch = "x86_64")]
                $crate::device::cpu::isa::Isa::Avx2 | $crate::device::cpu::isa::Isa::AvxVnni => {
                    // SAFETY: as above.
                    unsafe { avx2($($arg),*) }
                }
                $crate::device::cpu::isa::Isa::Portable => $body($($arg),*),
            }
        }
    };
}
pub(super) use multiversion;

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use crate::device::cpu::testing::lacks;

    /// Kernel tests run only with the sets that the processor has. This test reports the sets that
    /// it lacks.
    #[test]
    fn every_set_of_kernels_is_tried() {
        let all = [
            Isa::Avx2,
            Isa::AvxVnni,
            Isa::Avx512,
            Isa::Avx512Vnni,
            Isa::Avx512Bf16,
            Isa::Amx,
        ];
        let available = Isa::available();
        let missing: Vec<String> = all
            .iter()
            .filter(|isa| !available.contains(isa))
            .map(Isa::to_string)
            .collect();
        if !missing.is_empty() {
            let what = format!("{}: their kernels did not run", missing.join(", "));
            lacks("device::cpu::isa::tests::every_set_of_kernels_is_tried", &what);
        }
    }
}
