//! Converts device time to money.

/// Dollars for `seconds` of a device at `usd_per_hour`; `None` where the job names no price.
pub fn dollars(seconds: f64, usd_per_hour: Option<f64>) -> Option<f64> {
    usd_per_hour.map(|price| seconds / 3600.0 * price)
}

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
    fn an_hour_costs_the_hourly_price() {
        assert_eq!(dollars(3600.0, Some(2.6)), Some(2.6));
        assert_eq!(dollars(3600.0, None), None);
        assert_eq!(show_dollars(0.01234), "$0.0123");
        assert_eq!(show_dollars(12.345), "$12.35");
    }
}
