// Numbers as text. Unknown values are a dash.

export const UNKNOWN = "–";

function isUnknown(value) {
  return value === null || value === undefined || Number.isNaN(value);
}

/** A duration in seconds, such as "58 ms", "1.2 s" or "3 min". */
export function duration(seconds) {
  if (isUnknown(seconds)) {
    return UNKNOWN;
  }
  if (seconds < 0.0995) {
    return `${(seconds * 1000).toFixed(seconds > 0 && seconds < 0.00995 ? 1 : 0)} ms`;
  }
  if (seconds < 0.9995) {
    return `${Math.round(seconds * 1000)} ms`;
  }
  if (seconds < 59.95) {
    return `${seconds.toFixed(seconds < 9.95 ? 1 : 0)} s`;
  }
  if (seconds < 3600) {
    return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  }
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

/** A count with separators of thousands. */
export function count(value) {
  return isUnknown(value) ? UNKNOWN : Math.round(value).toLocaleString("en-US");
}

/** A rate per second. */
export function rate(value) {
  if (isUnknown(value)) {
    return UNKNOWN;
  }
  return value.toFixed(value > 0 && value < 9.95 ? 1 : 0);
}

/** A share of 0..1 as percent. */
export function percent(value) {
  return isUnknown(value) ? UNKNOWN : `${Math.round(value * 100)} %`;
}

/** A cost or score with its unit. */
export function amount(value, unit) {
  if (isUnknown(value)) {
    return UNKNOWN;
  }
  const digits = unit === "ms" ? (Math.abs(value) < 9.95 ? 1 : 0) : 3;
  const text = value.toLocaleString("en-US", {
    minimumFractionDigits: digits,
    maximumFractionDigits: digits,
  });
  return unit ? `${text} ${unit}` : text;
}
