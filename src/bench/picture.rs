//! Draws the steps of a benchmark as an SVG: tokens per step over time, prefill stacked on decode.

use std::fmt::Write;

use super::figures::StepRecord;

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 320.0;
/// Left margin (for the axis labels) and top margin of the plot.
const MARGIN: (f64, f64) = (64.0, 24.0);
/// Maximum number of time slices.
const SLICES_MAX: usize = 480;
const PREFILL: &str = "#c9743a";
const DECODE: &str = "#3a6ea5";

/// Mean tokens per step in each time slice, as (prefill, decode).
fn time_slices(steps: &[StepRecord], seconds: f64) -> Vec<(f64, f64)> {
    let count = SLICES_MAX.min(steps.len()).max(1);
    let mut sums = vec![(0.0, 0.0, 0.0); count];
    for step in steps {
        let slice = (step.start.as_secs_f64() / seconds.max(f64::MIN_POSITIVE) * count as f64) as usize;
        let sum = &mut sums[slice.min(count - 1)];
        sum.0 += step.size.prefill_tokens as f64;
        sum.1 += step.size.decode_tokens as f64;
        sum.2 += 1.0;
    }
    sums.into_iter()
        .map(|(prefill, decode, steps_in_slice): (f64, f64, f64)| {
            (prefill / steps_in_slice.max(1.0), decode / steps_in_slice.max(1.0))
        })
        .collect()
}

/// Returns the SVG, with `title` above the plot.
pub fn picture(steps: &[StepRecord], seconds: f64, title: &str) -> String {
    let time_slices = time_slices(steps, seconds);
    let tokens_max = time_slices
        .iter()
        .map(|(prefill, decode)| prefill + decode)
        .fold(1.0, f64::max);
    let (left, top) = MARGIN;
    let (bottom, right) = (HEIGHT - 40.0, WIDTH - 16.0);
    let (plot_width, plot_height) = (right - left, bottom - top);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n\
         <text x=\"{left}\" y=\"16\">{}</text>\n",
        escape(title)
    );
    let width = plot_width / time_slices.len() as f64;
    for (i, (prefill, decode)) in time_slices.iter().enumerate() {
        let x = left + i as f64 * width;
        let mut bar_bottom = bottom;
        for (tokens, colour) in [(decode, DECODE), (prefill, PREFILL)] {
            let height = tokens / tokens_max * plot_height;
            if height > 0.0 {
                bar_bottom -= height;
                let _ = writeln!(
                    svg,
                    "<rect x=\"{x:.2}\" y=\"{bar_bottom:.2}\" width=\"{width:.2}\" height=\"{height:.2}\" fill=\"{colour}\"/>"
                );
            }
        }
    }
    let _ = writeln!(
        svg,
        "<path d=\"M{left} {top}V{bottom}H{right}\" fill=\"none\" stroke=\"black\"/>\n\
         <text x=\"{x}\" y=\"{y}\" text-anchor=\"end\">{tokens_max:.0}</text>\n\
         <text x=\"{x}\" y=\"{bottom}\" text-anchor=\"end\">0</text>\n\
         <text x=\"{left}\" y=\"{label_y}\">0 s</text>\n\
         <text x=\"{right}\" y=\"{label_y}\" text-anchor=\"end\">{seconds:.1} s</text>\n\
         <text x=\"{middle}\" y=\"{label_y}\" text-anchor=\"middle\">tokens a step: \
         <tspan fill=\"{PREFILL}\">prefill</tspan> on <tspan fill=\"{DECODE}\">decode</tspan></text>\n</svg>",
        x = left - 6.0,
        y = top + 10.0,
        label_y = bottom + 20.0,
        middle = left + plot_width / 2.0,
    );
    svg
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::engine::totals::StepSize;

    #[test]
    fn every_step_is_in_its_slice_of_time() {
        let steps: Vec<StepRecord> = (0..10)
            .map(|i| StepRecord {
                start: Duration::from_millis(i * 100),
                duration: Duration::from_millis(100),
                size: StepSize {
                    prefill_tokens: if i < 5 { 30 } else { 0 },
                    decode_tokens: 4,
                    ..StepSize::default()
                },
            })
            .collect();
        let time_slices = time_slices(&steps, 1.0);
        assert_eq!(time_slices.len(), 10);
        assert_eq!((time_slices[0], time_slices[9]), ((30.0, 4.0), (0.0, 4.0)));
        let svg = picture(&steps, 1.0, "a < b");
        assert_eq!(svg.matches(PREFILL).count(), 5 + 1);
        assert_eq!(svg.matches(DECODE).count(), 10 + 1);
        assert!(svg.contains("a &lt; b") && svg.ends_with("</svg>\n"));
        assert!(picture(&[], 0.0, "nothing").contains("</svg>"));
    }
}
