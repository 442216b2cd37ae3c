//! Checks inputs that layers have besides the stream.

use super::inputs::{TestTensor, numbers};
use super::operations::to_device_error;
use super::tolerance::Tolerance;
use super::{Comparison, Finding, compare};
use crate::device::{Activation, Device, DeviceError, LayerInputs};

const ROWS: usize = 5;
const LAYERS: usize = 3;

/// Inputs of all layers, and what the second one makes of its own.
fn run<D: Device>(device: &D, width: usize) -> Result<[Vec<f32>; 2], DeviceError> {
    let all = LAYERS * width;
    let [mut projected, mut inputs, mut gate, mut out] = [(); 4].map(|()| device.buffer());
    let norm = to_device_error(device.norm(TestTensor::new(50, 1, width, 2.0).tensor()))?;
    device.write(&numbers(51, ROWS * all), all, &mut projected)?;
    device.write(&numbers(52, ROWS * all), all, &mut inputs)?;
    device.write(&numbers(53, ROWS * width), width, &mut gate)?;
    let op = LayerInputs {
        projected: &projected,
        norm: &norm,
        eps: 1e-2,
        scale: 0.7,
    };
    device.add_layer_inputs(op, &mut inputs)?;
    device.gate_layer_input(Activation::GeluTanh, &gate, (&inputs, 1), &mut out)?;
    Ok([device.read(&inputs)?, device.read(&out)?])
}

pub(super) fn check_layer_inputs<D: Device>(
    comparison: &Comparison<'_, D>,
    report: &mut dyn FnMut(Finding),
) -> Result<(), DeviceError> {
    for width in [16, 256, 1040] {
        let want = run(&comparison.reference, width)?;
        let got = run(comparison.device, width)?;
        let names = [
            ("inputs of layers", "bf16"),
            ("a layer's input", comparison.precision.name()),
        ];
        let tolerances = [Tolerance::layer_inputs(), Tolerance::gated(comparison.precision)];
        for (((operation, format), tolerance), (want, got)) in
            names.into_iter().zip(tolerances).zip(want.iter().zip(&got))
        {
            let shape = format!("{ROWS} x {LAYERS} x {width}");
            let width = want.len() / ROWS;
            report(compare((operation, format, shape), tolerance, width, want, got));
        }
    }
    Ok(())
}
