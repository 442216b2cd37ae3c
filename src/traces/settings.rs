//! Where spans go, and whether: the command's option, and the variables that OpenTelemetry defines
//! for all programs. The library reads the others by itself: those of headers, sampler, resource and
//! batches.

use url::Url;

const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
/// As [`ENDPOINT`], for traces alone, and taken as it stands.
const TRACES_ENDPOINT: &str = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";
const DISABLED: &str = "OTEL_SDK_DISABLED";
const EXPORTER: &str = "OTEL_TRACES_EXPORTER";
const SAMPLER: &str = "OTEL_TRACES_SAMPLER";
const SAMPLER_ARG: &str = "OTEL_TRACES_SAMPLER_ARG";
const COMPRESSION: [&str; 2] = [
    "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION",
    "OTEL_EXPORTER_OTLP_COMPRESSION",
];
const PROTOCOL: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"];
/// The form in which spans are sent.
const OWN_PROTOCOL: &str = "http/protobuf";

/// The samplers that the library knows. For any other name it would silently take all traces.
const SAMPLERS: &[&str] = &[
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
];

/// See the module's description.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Settings {
    /// The address of posts.
    pub endpoint: Url,
    /// What the user should know.
    pub warning: Option<String>,
}

impl Settings {
    /// Reads the settings; `None`: no spans are sent. `option`: the command's own option, which
    /// comes before the environment, `variable`.
    ///
    /// # Errors
    /// A value is invalid; the error is one line.
    pub(super) fn read(
        option: Option<&str>,
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Option<Settings>, String> {
        // OpenTelemetry has an empty variable mean the same as none.
        let variable = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
        if variable(DISABLED).is_some_and(|value| value.trim().eq_ignore_ascii_case("true")) {
            return Ok(None);
        }
        let endpoint = if let Some(address) = option {
            Some(base_endpoint("--otlp-endpoint", address)?)
        } else if let Some(address) = variable(TRACES_ENDPOINT) {
            Some(parse("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", &address)?)
        } else {
            let address = variable(ENDPOINT);
            address.map(|address| base_endpoint(ENDPOINT, &address)).transpose()?
        };
        let Some(endpoint) = endpoint else { return Ok(None) };
        match variable(EXPORTER).as_deref().map(str::trim) {
            None | Some("otlp") => {}
            Some("none") => return Ok(None),
            Some(other) => {
                return Err(format!(
                    "`{EXPORTER}` is `{other}`: traces are sent as `otlp`, or not at all (`none`)"
                ));
            }
        }
        check_sampler(variable(SAMPLER).as_deref(), variable(SAMPLER_ARG).as_deref())?;
        let first = |names: [&'static str; 2]| names.into_iter().find_map(|name| Some((name, variable(name)?)));
        if let Some((name, value)) = first(COMPRESSION).filter(|(_, value)| value.trim() != "none") {
            return Err(format!(
                "`{name}` is `{value}`: traces are sent as they are, so set it to `none`, or leave it out"
            ));
        }
        let warning = first(PROTOCOL)
            .filter(|(_, value)| value.trim() != OWN_PROTOCOL)
            .map(|(name, value)| {
                format!(
                    "`{name}` is `{value}`: traces are sent as {OWN_PROTOCOL} all the same, which collectors take at port 4318"
                )
            });
        Ok(Some(Settings { endpoint, warning }))
    }
}

/// The address of posts below a collector's own address.
fn base_endpoint(source: &str, address: &str) -> Result<Url, String> {
    let mut url = parse(source, address)?;
    if let Ok(mut path) = url.path_segments_mut() {
        path.pop_if_empty().extend(["v1", "traces"]);
    }
    Ok(url)
}

fn parse(source: &str, address: &str) -> Result<Url, String> {
    let url = Url::parse(address.trim()).ok();
    let url = url.filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
    let Some(url) = url else {
        return Err(format!(
            "`{source}` is no address of a collector: give one such as `http://collector:4318`"
        ));
    };
    if !url.username().is_empty() || url.password().is_some() {
        return Err(format!(
            "`{source}` holds a user or a password: give them as a header in `OTEL_EXPORTER_OTLP_HEADERS`"
        ));
    }
    Ok(url)
}

fn check_sampler(sampler: Option<&str>, argument: Option<&str>) -> Result<(), String> {
    let Some(sampler) = sampler else { return Ok(()) };
    if !SAMPLERS.contains(&sampler) {
        return Err(format!(
            "`{SAMPLER}` is `{sampler}`: it is one of {}",
            SAMPLERS.join(", ")
        ));
    }
    let is_share = |text: &str| text.parse::<f64>().is_ok_and(|share| (0.0..=1.0).contains(&share));
    if sampler.ends_with("traceidratio") && !argument.is_some_and(is_share) {
        return Err(format!(
            "`{SAMPLER_ARG}` is the share of traces that `{sampler}` keeps: give a number from 0 to 1"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(option: Option<&str>, variables: &[(&str, &str)]) -> Result<Option<Settings>, String> {
        let variable = |name: &str| {
            let mut variables = variables.iter();
            let found = variables.find(|(other, _)| *other == name);
            found.map(|(_, value)| value.to_string())
        };
        Settings::read(option, &variable)
    }

    #[track_caller]
    fn endpoint(option: Option<&str>, variables: &[(&str, &str)]) -> Option<String> {
        let settings = read(option, variables).unwrap();
        settings.map(|settings| settings.endpoint.to_string())
    }

    #[test]
    fn the_option_comes_before_the_environment() {
        let general = (ENDPOINT, "http://general:4318/");
        let traces = (TRACES_ENDPOINT, "http://traces:4318/own");
        assert_eq!(endpoint(None, &[]), None);
        assert_eq!(endpoint(None, &[(ENDPOINT, ""), (TRACES_ENDPOINT, " ")]), None);
        let read = |option, variables: &[_]| endpoint(option, variables).unwrap();
        assert_eq!(read(None, &[general]), "http://general:4318/v1/traces");
        assert_eq!(read(None, &[general, traces]), "http://traces:4318/own");
        assert_eq!(
            read(Some("https://own/otlp"), &[general, traces]),
            "https://own/otlp/v1/traces"
        );
    }

    #[test]
    fn the_environment_switches_traces_off() {
        let option = Some("http://own:4318");
        for off in [(DISABLED, "TRUE"), (EXPORTER, "none")] {
            assert_eq!(endpoint(option, &[off]), None, "{off:?}");
        }
        for on in [(DISABLED, "false"), (EXPORTER, "otlp")] {
            assert!(endpoint(option, &[on]).is_some(), "{on:?}");
        }
    }

    #[test]
    fn what_cannot_be_done_is_refused_in_a_line() {
        let option = Some("http://own:4318");
        for (variable, why) in [
            ((EXPORTER, "zipkin"), "`otlp`"),
            ((SAMPLER, "sometimes"), "it is one of always_on"),
            ((SAMPLER, "traceidratio"), "a number from 0 to 1"),
            ((COMPRESSION[1], "gzip"), "set it to `none`"),
        ] {
            let error = read(option, &[variable]).unwrap_err();
            assert!(error.contains(why) && error.lines().count() == 1, "{error}");
        }
        for share in ["", "1.5", "-1", "half", "NaN"] {
            let variables = [(SAMPLER, "parentbased_traceidratio"), (SAMPLER_ARG, share)];
            assert!(read(option, &variables).is_err(), "{share}");
        }
        let variables = [
            (SAMPLER, "traceidratio"),
            (SAMPLER_ARG, "0.1"),
            (COMPRESSION[0], "none"),
        ];
        assert!(read(option, &variables).unwrap().is_some());
        for (address, why) in [
            ("", "no address"),
            ("collector:4317", "no address"),
            ("grpc://collector:4317", "no address"),
            ("http://", "no address"),
            ("http://user:hunter2@collector", "OTEL_EXPORTER_OTLP_HEADERS"),
        ] {
            let error = read(Some(address), &[]).unwrap_err();
            assert!(error.contains(why) && !error.contains("hunter2"), "{address}: {error}");
        }
    }

    #[test]
    fn another_protocol_is_warned_of() {
        let warning = |value| {
            read(Some("http://own:4318"), &[(PROTOCOL[1], value)])
                .unwrap()
                .unwrap()
                .warning
        };
        assert_eq!(warning(OWN_PROTOCOL), None);
        assert!(warning("grpc").unwrap().contains("4318"));
    }
}
