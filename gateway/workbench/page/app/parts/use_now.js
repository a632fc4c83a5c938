// The time, for what shows how long something has gone on.
import { useEffect, useState } from "./html.js";

/** Milliseconds, renewed each second while something continues. @param {boolean} isRunning */
export function useNow(isRunning) {
  const [now, setNow] = useState(Date.now());
  useEffect(() => {
    if (!isRunning) return;
    setNow(Date.now());
    const timer = setInterval(() => setNow(Date.now()), 1000);
    return () => clearInterval(timer);
  }, [isRunning]);
  return now;
}
