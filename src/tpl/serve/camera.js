/* The camera: its frames are sent to the same route as chosen images, one after the other */
const FRAME = 640, PAUSE = 250;  // pixels of the longer side; milliseconds between an answer and the next frame
let stream = null;
function cameraProblem(text) {
  $("camera-problem").textContent = text;
  $("camera-problem").hidden = !text;
}
const REFUSED = {
  NotAllowedError: "The camera was not allowed. The browser's settings for this page can change that.",
  NotFoundError: "No camera was found.",
  NotReadableError: "The camera is in use by another program.",
};
async function startCamera() {
  cameraProblem("");
  if (!navigator.mediaDevices) {
    cameraProblem("Browsers allow the camera on https:// pages and on this machine's own address (127.0.0.1, localhost) only.");
    return;
  }
  try {
    stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" }, audio: false });
  } catch (error) {
    cameraProblem(REFUSED[error.name] || `The camera cannot be used: ${error.message}`);
    return;
  }
  $("video").srcObject = stream;
  $("camera").hidden = false;
  $("camera-on").hidden = true;
  await $("video").play();
  watch(stream);
}
function stopCamera() {
  if (stream) stream.getTracks().forEach((track) => track.stop());
  stream = null;
  $("video").srcObject = null;
  $("camera").hidden = true;
  $("camera-on").hidden = false;
}
function frame(name) {
  const video = $("video"), scale = Math.min(1, FRAME / Math.max(video.videoWidth, video.videoHeight));
  const canvas = make("canvas", { width: Math.round(scale * video.videoWidth), height: Math.round(scale * video.videoHeight) });
  canvas.getContext("2d").drawImage(video, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => { canvas.toBlob((blob) => { resolve(new File([blob], name, { type: "image/jpeg" })); }, "image/jpeg", 0.9); });
}
async function watch(own) {
  while (stream === own) {
    if (!document.hidden && $("video").videoWidth) {
      try {
        const form = new FormData();
        form.append("files", await frame("frame.jpg"));
        const { answers } = await call("predict?top=2", { method: "POST", body: form });
        if (stream !== own) return;
        const doubtful = doubt(answers[0]);
        $("live").replaceChildren(...verdict(answers[0]));
        $("live-doubt").hidden = !doubtful;
        $("live-doubt").textContent = doubtful ? doubtful[1] : "";
      } catch (error) {
        stopCamera();
        cameraProblem(error.message);
        return;
      }
    }
    await new Promise((resolve) => { setTimeout(resolve, PAUSE); });
  }
}
$("camera-on").addEventListener("click", startCamera);
$("camera-off").addEventListener("click", stopCamera);
$("shoot").addEventListener("click", async () => { ask([await frame(`camera ${new Date().toLocaleTimeString("en-GB")}.jpg`)]); });
