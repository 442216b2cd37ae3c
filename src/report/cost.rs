//! Formats money.

/// Formats dollars for people: four decimals below one dollar, otherwise two.
pub fn show_dollars(usd: f64) -> String {
    if usd < 1.0 {
        format!("${usd:.4}")
    } else {
        format!("${usd:.2}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_amounts_have_four_decimals() {
        assert_eq!(show_dollars(0.01234), "$0.0123");
        assert_eq!(show_dollars(12.345), "$12.35");
    }
}
