// Where the mesh is: this module is in ui/VERSION/app/ of it. A proxy may publish it under a path of its host.

/** The path of the mesh, such as "/weft"; empty: the whole host is the mesh's. */
export const ROOT = new URL("../../..", import.meta.url).pathname.slice(0, -1);

/** The URL of the mesh, without a slash at its end. */
export const MESH_URL = location.origin + ROOT;

/** The name of what this browser keeps of the mesh: another mesh of the host has another path. @param {string} name */
export const keptName = (name) => name + ROOT;
